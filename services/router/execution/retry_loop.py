"""Runs attempts at one request until one of them completes the answer.

After a failed attempt the next one continues on other workers from the prompt and the emitted tokens. Seeds,
penalties and the token limit count from the first emitted token. So the client sees a pause and the same
text.
"""

from __future__ import annotations

import asyncio
import logging

from services.router.execution.attempt_types import WorkerFailed
from services.router.execution.dispatcher import Assignment
from services.router.execution.hedging import AttemptEnd, AttemptSuspended, HedgedAttempt
from services.router.execution.request_state import RequestState
from services.router.execution.worker_selection import select_workers
from slipstream import errors
from slipstream.v1 import common_pb2

log = logging.getLogger(__name__)

# How long a request with strikes waits before it asks the quarantine again.
_SUSPECT_PAUSE_S = 0.02


async def run_attempts(state: RequestState) -> AttemptEnd:
    """Run attempts, and return the end of the last one. Raises the client's error.

    An answer for which no worker has room any more ends at its length.
    """
    last: Assignment | None = None
    try:
        while True:
            if state.is_held:
                await state.wait_for_client()
                continue  # it may be held again
            state.stats.attempts += 1
            last = await _select_safe_workers(state)
            end = await _attempt(state, last)
            if end is not None:
                return end
    except errors.ContextExceeded:
        if last is None or not state.output.tokens:
            raise
        return AttemptEnd(last, common_pb2.FINISH_REASON_LENGTH)


async def _attempt(state: RequestState, assignment: Assignment) -> AttemptEnd | None:
    """Run one attempt; the answer's end, or None if another one is to follow. Raises the client's error."""
    stopped = AttemptEnd(assignment, common_pb2.FINISH_REASON_STOP)
    shown_tokens = len(state.output.tokens)
    outcome = await _try_once(state, assignment)
    if isinstance(outcome, AttemptEnd):
        return outcome
    if isinstance(outcome, AttemptSuspended):
        await state.wait_for_client()
        return stopped if state.output.stopped else None  # the flushed text contained a stop string
    log.warning("%s attempt %d: %s", state.request_id, state.stats.attempts, outcome.error)
    state.trail.moved(
        attempt=state.stats.attempts, worker=_instance(outcome.worker), text=outcome.error.message
    )
    if outcome.is_drain:
        state.context.counters.add("slipstream_drain_failovers_total")
    await state.flush()
    if state.output.stopped:  # the flushed text contained a stop string
        return stopped
    new_tokens = len(state.output.tokens) - shown_tokens
    state.retry_policy.failed(outcome.error, outcome.worker, outcome.other_worker, new_tokens=new_tokens)
    return None


async def _select_safe_workers(state: RequestState) -> Assignment:
    """Choose workers for the next attempt. Requests with strikes begin one after another on a worker."""
    quarantine = state.context.failover.quarantine
    assignment = await select_workers(state)
    while state.suspect.strikes and not quarantine.may_begin(state.suspect, assignment.workers.keys):
        await asyncio.sleep(_SUSPECT_PAUSE_S)
        assignment = await select_workers(state)
    return assignment


async def _try_once(
    state: RequestState, assignment: Assignment
) -> AttemptEnd | WorkerFailed | AttemptSuspended:
    """Run one attempt, registered in the quarantine. Raises Quarantined when the request crashes workers."""
    quarantine = state.context.failover.quarantine
    quarantine.begin(state.suspect, assignment.workers.keys)
    crashed: str | None = None
    try:
        outcome = await HedgedAttempt(state, assignment).run()
        if isinstance(outcome, WorkerFailed) and outcome.is_crash:
            state.suspect.content = state.content()
            await state.context.failover.check_exit_reports(state.suspect, outcome.worker)
            crashed = outcome.worker  # a cancel before this line ends the request without a strike
        elif isinstance(outcome, WorkerFailed) and outcome.silent is not None:
            state.suspect.content = state.content()
            state.context.failover.watch_silent(state.suspect, outcome.silent)
        elif isinstance(outcome, AttemptEnd):
            quarantine.acquit(state.suspect)
        return outcome
    finally:
        quarantine.end(state.suspect, crashed=crashed)


def _instance(link: str) -> str:
    """The instance in the key of a connection (`run_name`)."""
    return link.split("/")[1] if link.count("/") == 2 else link

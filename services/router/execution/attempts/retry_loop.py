"""Runs attempts at one request until one of them completes the answer.

After a failed attempt the next one continues on other workers from the prompt and the emitted tokens. Seeds,
penalties and the token limit count from the first emitted token. So the client sees a pause and the same
text.
"""

from __future__ import annotations

import asyncio
import logging

from services.router.execution.attempt_types import WorkerFailed
from services.router.execution.attempts.hedging import AttemptEnd, AttemptSuspended, HedgedAttempt
from services.router.execution.attempts.worker_selection import select_workers
from services.router.execution.dispatcher import Assignment
from services.router.execution.request_state import RequestState
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
            if last is not None:  # a lost worker may have had a hundred requests: a few begin again at a time
                await state.context.start_pacer.acquire(state.caller.tenant)
            if state.is_held:
                await state.wait_for_client()
                continue  # it may be held again
            state.stats.attempts += 1  # the choice of workers depends on it
            last = await _select_safe_workers(state)
            if state.is_held:  # it was meanwhile, and a hold finds no attempt that has not begun
                state.stats.attempts -= 1
                continue
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
    state.timeline.moved(
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
    failover, suspect = state.context.failover, state.suspect
    failover.quarantine.begin(suspect, assignment.workers.keys)
    hedged = HedgedAttempt(state, assignment)
    try:
        outcome = await hedged.run()
    except asyncio.CancelledError:
        state.spawn(_end_cancelled(state, hedged, assignment))
        raise
    except BaseException:
        failover.quarantine.end(suspect)
        raise
    if isinstance(outcome, WorkerFailed) and outcome.is_crash:
        await _end_crashed(state, outcome.worker)
        return outcome
    if isinstance(outcome, WorkerFailed) and outcome.silent is not None:
        suspect.content = state.content()
        failover.watch_silent(suspect, outcome.silent)
    elif isinstance(outcome, AttemptEnd):
        failover.quarantine.clear_strikes(suspect)
    failover.quarantine.end(suspect)
    return outcome


async def _end_crashed(state: RequestState, worker: str) -> None:
    """End an attempt that crashed the worker. A cancel meanwhile changes nothing: the strike counts."""
    state.suspect.content = state.content()
    judging = asyncio.create_task(_judge(state, worker))
    try:
        verdict = await asyncio.shield(judging)
    except asyncio.CancelledError:
        state.spawn(_wait(judging))
        raise
    if verdict is not None:
        raise verdict


async def _judge(state: RequestState, worker: str) -> errors.Quarantined | None:
    failover = state.context.failover
    await failover.check_exit_reports(state.suspect, worker)
    try:
        failover.quarantine.end(state.suspect, crashed=worker)
    except errors.Quarantined as verdict:
        return verdict
    return None


async def _wait(judging: asyncio.Task[errors.Quarantined | None]) -> None:
    await judging


async def _end_cancelled(state: RequestState, hedged: HedgedAttempt, assignment: Assignment) -> None:
    """End an attempt that was cancelled. Its workers may crash by it until they have released it, so their
    next reports decide. They go on, or they have ended, which is a strike."""
    failover, workers = state.context.failover, assignment.workers
    await hedged.wait_released()
    if state.suspect.workers:
        state.suspect.content = state.content()
        for link in (workers.prefill, workers.decode):
            if link is not None:
                failover.watch_silent(state.suspect, link)
    failover.quarantine.end(state.suspect)


def _instance(link: str) -> str:
    """The instance in the key of a connection (`run_name`)."""
    return link.split("/")[1] if link.count("/") == 2 else link

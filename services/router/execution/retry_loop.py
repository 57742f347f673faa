"""Attempt after attempt at one request until one of them comes to the answer's end.

A failed attempt is repeated on other workers from (prompt + emitted tokens). Seeds, penalties and the token
limit count from the first emitted token, so the client sees a pause and the same text.
"""

from __future__ import annotations

import asyncio
import logging

from services.router.execution.attempt_types import WorkerFailed
from services.router.execution.dispatcher import Assignment
from services.router.execution.hedging import AttemptEnd, HedgedAttempt
from services.router.execution.request_state import RequestState
from services.router.execution.worker_selection import select_workers
from slipstream.v1 import common_pb2

log = logging.getLogger(__name__)

# How often a request under suspicion asks whether it may begin.
_SUSPECT_PAUSE_S = 0.02


async def run_attempts(state: RequestState) -> AttemptEnd:
    """Where the attempt ran that came to the end, and why it ended. Raises the error for the client."""
    while True:
        state.stats.attempts += 1
        assignment = await _select_safe_workers(state)
        shown_tokens = len(state.output.tokens)
        outcome = await _try_once(state, assignment)
        if isinstance(outcome, AttemptEnd):
            return outcome
        log.warning("%s attempt %d: %s", state.request_id, state.stats.attempts, outcome.error)
        if outcome.moved:
            state.context.counters.add("slipstream_moves_total")
        await state.flush()
        if state.output.stopped:  # by what was flushed
            return AttemptEnd(assignment, common_pb2.FINISH_REASON_STOP)
        new_tokens = len(state.output.tokens) - shown_tokens
        state.retry_policy.failed(outcome.error, outcome.worker, outcome.other, new_tokens=new_tokens)


async def _select_safe_workers(state: RequestState) -> Assignment:
    """Workers for the next attempt. Requests under suspicion begin one after another on a worker."""
    quarantine = state.context.failover.quarantine
    assignment = await select_workers(state)
    while state.suspect.strikes and not quarantine.may_begin(state.suspect, assignment.workers.keys):
        await asyncio.sleep(_SUSPECT_PAUSE_S)
        assignment = await select_workers(state)
    return assignment


async def _try_once(state: RequestState, assignment: Assignment) -> AttemptEnd | WorkerFailed:
    """One attempt, under the quarantine's eyes. Raises Quarantined when workers died of the request."""
    quarantine = state.context.failover.quarantine
    quarantine.begin(state.suspect, assignment.workers.keys)
    died: str | None = None
    try:
        outcome = await HedgedAttempt(state, assignment).run()
        if isinstance(outcome, WorkerFailed) and outcome.died:
            state.suspect.content = state.content()
            await state.context.failover.hear_evidence(state.suspect, outcome.worker)
            died = outcome.worker  # a cancel before this leaves no verdict: the request ends anyway
        return outcome
    finally:
        quarantine.leave(state.suspect, died=died)

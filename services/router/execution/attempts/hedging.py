"""Hedging: two attempts at one request run in parallel, and the first one that delivers a token wins.

The second attempt, the hedge, begins on another prefill worker when the first one takes unusually long
(policies/hedge_policy.py). The slower attempt is aborted and released. Every attempt runs in a
`HedgedAttempt`, which retry_loop.py makes, also where no hedge begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from opentelemetry.trace import INVALID_SPAN, Span

from libs.common.cluster.worker_record import Role
from libs.common.telemetry import tracing
from services.router.execution.attempt_types import (
    FINISH_NONE,
    TokenBatch,
    WorkerFailed,
    capped,
    closing,
)
from services.router.execution.attempts.attempt import WorkerAttempt
from services.router.execution.attempts.worker_selection import (
    choose_workers,
    note_assignment,
    requested_prefill,
)
from services.router.execution.dispatcher import Assignment
from services.router.execution.policies.context_room import capped_output_tokens
from services.router.execution.request_state import RequestState
from services.router.workers.connection import WorkerConnection
from slipstream import errors
from slipstream.v1 import common_pb2


@dataclass(slots=True)
class AttemptEnd:
    """The attempt that completed the answer, and its finish reason."""

    assignment: Assignment
    finish: common_pb2.FinishReason.ValueType


class AttemptSuspended:
    """The attempt left its workers: the client reads nothing, or live requests hold the job."""


class HedgedAttempt:
    """One attempt and its hedge. Listens to both, and pushes the winner's tokens into the request state."""

    def __init__(self, state: RequestState, assignment: Assignment) -> None:
        self._state = state
        self._assignment = assignment
        self._live: dict[WorkerAttempt, Assignment] = {}  # not released yet
        self._first: WorkerAttempt | None = None
        self._first_failure: WorkerFailed | None = None  # while the hedge goes on
        self._winner: WorkerAttempt | None = None
        self._began_s = state.context.clock()
        self._timer: asyncio.TimerHandle | None = None
        self._releases: list[asyncio.Event] = []  # set when the workers of an attempt hold nothing of it
        self._outcome: asyncio.Future[AttemptEnd | WorkerFailed | AttemptSuspended] = (
            asyncio.get_running_loop().create_future()
        )

    async def run(self) -> AttemptEnd | WorkerFailed | AttemptSuspended:
        """Run to the answer's end, a failure or `suspend`. On return all attempts are being released."""
        state = self._state
        state.hedged = self
        try:
            self._first = self._begin(self._assignment)
            delay_s = self._hedge_delay_s()
            if delay_s is not None:
                self._timer = asyncio.get_running_loop().call_later(delay_s, self._hedge)
            outcome = await self._outcome
            if isinstance(outcome, WorkerFailed):
                self._fail_spans(outcome.error)
            elif isinstance(outcome, AttemptSuspended):
                if not state.is_held:
                    state.context.counters.add("slipstream_requests_suspended_total")
            elif self._winner is not None and not self._winner.is_over:  # a stop string ended the answer
                state.stats.add_stats(await self._winner.stop())
            return outcome
        except (errors.SlipstreamError, asyncio.CancelledError) as error:
            self._fail_spans(error)
            raise
        finally:
            self._close()

    async def wait_released(self) -> None:
        """Return when the workers of all attempts hold nothing, or cannot be reached. After `run`."""
        for released in self._releases:
            await released.wait()

    # ---- calls of the attempts

    def on_batch(self, attempt: WorkerAttempt, batch: TokenBatch) -> None:
        """See `AttemptListener`. The client gets the tokens before the statistics are updated."""
        assignment = self._live.get(attempt)
        if assignment is None or self._outcome.done() or self._state.is_closed:
            return
        if self._winner is None:
            self._choose_winner(attempt)
        is_last = batch.finish != FINISH_NONE
        if batch.is_closing:
            self._state.spec = closing(self._state.spec)  # of later attempts
        self._state.deliver(batch.tokens, batch.logprobs, is_last=is_last)
        self._observe(assignment, batch)
        if is_last:
            self._outcome.set_result(AttemptEnd(assignment, batch.finish))
        elif self._state.output.stopped:
            self._outcome.set_result(AttemptEnd(assignment, common_pb2.FINISH_REASON_STOP))

    def on_prompt_logprobs(self, attempt: WorkerAttempt, pieces: Sequence[common_pb2.PromptLogprobs]) -> None:
        """See `AttemptListener`. Rows of both attempts count: they are those of one model."""
        if attempt in self._live and not (self._outcome.done() or self._state.is_closed):
            self._state.deliver_prompt(pieces)

    def on_attempt_failed(self, attempt: WorkerAttempt, failure: WorkerFailed) -> None:
        """See `AttemptListener`. When both fail, the first one's failure counts."""
        if attempt not in self._live or self._outcome.done():
            return
        if len(self._live) == 1:
            self._outcome.set_result(failure)
        elif attempt is self._first:
            self._first_failure = failure
        else:
            self._drop(attempt, failure)
            if self._first_failure is not None:
                self._outcome.set_result(self._first_failure)

    def on_listener_error(self, error: Exception) -> None:
        """See `AttemptListener`."""
        if not self._outcome.done():
            self._outcome.set_exception(error)

    def may_leave(self, link: WorkerConnection) -> bool:
        """See `AttemptListener`."""
        return self._has_substitute(link) and self._state.begin_move(link.key)

    def suspend(self) -> None:
        """See `Suspendable`. An attempt without a token has nothing that a client could leave unread."""
        if self._outcome.done() or (self._winner is None and not self._state.is_held):
            return
        if self._winner is not None:
            self._winner.resume()  # the state takes what has arrived, perhaps the answer's end
        if not self._outcome.done():
            self._outcome.set_result(AttemptSuspended())

    def _has_substitute(self, link: WorkerConnection) -> bool:
        """Whether another worker of the tier has the room that the request asks for first."""
        room = self._state.rooms[0]
        tokens = room.prefill_tokens if link.worker.role is Role.PREFILL else room.decode_tokens
        return self._state.context.fleet.has_substitute(link, context_tokens=tokens)

    # ---- the hedge

    def _hedge_delay_s(self) -> float | None:
        """The time after which a hedge begins if the first attempt has delivered no token; None = never."""
        state, workers = self._state, self._assignment.workers
        if workers.prefill is None or requested_prefill(state):
            return None
        context_tokens = len(state.spec.prompt) + len(state.output.tokens)
        uncached = workers.uncached_tokens if workers.uncached_tokens is not None else context_tokens
        wait_ms = state.context.failover.hedge_policy.wait_ms(
            uncached_tokens=uncached,
            cached_tokens=context_tokens - uncached,
            other_workers=int(self._has_substitute(workers.prefill)),
        )
        return None if wait_ms is None else wait_ms / 1e3

    def _hedge(self) -> None:
        """Begin a second attempt if another worker is available and the hedge budget is not spent.

        A request with strikes gets no hedge, so that it endangers one pair of workers only.
        """
        state, policy = self._state, self._state.context.failover.hedge_policy
        prefill = self._assignment.workers.prefill
        is_decided = self._winner is not None or self._outcome.done()
        if is_decided or prefill is None or state.suspect.strikes or not policy.has_budget:
            return
        try:
            avoid = state.retry_policy.avoid | {prefill.key}
            assignment = choose_workers(state, avoid, may_skip_prefill=False)
        except errors.SlipstreamError:
            return
        try:
            policy.spend()
            state.context.failover.quarantine.add_workers(state.suspect, assignment.workers.keys)
            state.stats.attempts += 1
            state.context.counters.add("slipstream_hedges_total")
            self._begin(assignment, is_hedge=True)
        except Exception as error:
            self.on_listener_error(error)

    def _choose_winner(self, attempt: WorkerAttempt) -> None:
        self._winner = self._state.delivering = attempt
        self._state.max_tokens = attempt.spec.sampling.max_tokens
        for other in list(self._live):
            if other is not attempt:
                self._drop(other, self._first_failure)
        # The hedge, which was placed later, overwrote the decision. If the first attempt wins, restore it.
        if self._state.decision is not self._live[attempt].decision:
            note_assignment(self._state, self._live[attempt])
            self._state.timeline.runs_at(self._live[attempt].decision)

    def _drop(self, loser: WorkerAttempt, failure: WorkerFailed | None) -> None:
        """Release the attempt that failed or was slower; the other one continues."""
        assignment = self._live.pop(loser)
        (other,) = self._live.values()
        left = set(assignment.workers.keys) - set(other.workers.keys)
        crashed = failure.worker if failure is not None and failure.is_crash else None
        failover = self._state.context.failover
        if crashed is not None:
            failover.report_crash(crashed)
        failover.quarantine.leave_workers(self._state.suspect, left, crashed=crashed)
        text = failure.error.message if failure is not None else ""
        self._state.timeline.note("dropped", attempt=loser.number, text=text)
        if failure is not None:
            tracing.failed(failure.error, loser.span)
        self._release(loser)

    # ---- common

    def _begin(self, assignment: Assignment, *, is_hedge: bool = False) -> WorkerAttempt:
        attempt = self._make_attempt(assignment, is_hedge=is_hedge)
        self._live[attempt] = assignment
        self._state.timeline.placed(assignment.decision, attempt=attempt.number, is_hedge=is_hedge)
        attempt.begin()
        assignment.note_begun()  # after `begin`, so that the worker gets the prompt first
        self._state.show_started()
        return attempt

    def _make_attempt(self, assignment: Assignment, *, is_hedge: bool) -> WorkerAttempt:
        state, workers = self._state, assignment.workers
        state.context.counters.add("slipstream_attempts_total")
        span: Span = INVALID_SPAN
        if tracing.enabled():
            span = tracing.begin(
                "attempt",
                request_id=state.spec.request_id,
                attempt=state.stats.attempts,
                prefill=workers.prefill.worker.instance if workers.prefill is not None else "",
                decode=workers.decode.worker.instance,
                emitted_tokens=len(state.output.tokens),
                hedge=is_hedge,
            )
        most = capped_output_tokens(
            state.max_tokens,
            prompt_tokens=len(state.spec.prompt),
            worker_tokens=workers.decode.worker.max_context_tokens,
        )
        return WorkerAttempt(
            state.stats.attempts,
            capped(state.spec, most),
            workers,
            tuple(state.output.tokens),
            self,
            state.context.clock,
            defers_decode=is_hedge,
            timeline=state.timeline,
            span=span,
        )

    def _observe(self, assignment: Assignment, batch: TokenBatch) -> None:
        """Update the request's statistics, the worker models, the hedge policy and the quarantine."""
        state, workers = self._state, assignment.workers
        failover = state.context.failover
        state.stats.observe(batch, answer_tokens=len(state.output.tokens))
        state.sink.ttft_ms = state.stats.ttft_ms
        if batch.prefill_ms is not None and workers.uncached_tokens is not None:
            elapsed_ms = (state.context.clock() - self._began_s) * 1e3
            failover.hedge_policy.observe(elapsed_ms, uncached_tokens=workers.uncached_tokens)
        assignment.observe(batch)
        if not batch.tokens:
            return
        state.end_move()
        if state.suspect.workers:
            if workers.prefill is not None and workers.prefill.key in state.suspect.workers:
                failover.quarantine.leave_workers(state.suspect, (workers.prefill.key,))
            failover.quarantine.observe(state.suspect, len(batch.tokens))

    def _fail_spans(self, error: BaseException) -> None:
        for attempt in self._live:
            tracing.failed(error, attempt.span)

    def _release(self, attempt: WorkerAttempt) -> None:
        """Release an attempt in a separate task, which delays no client and survives a cancel."""
        attempt.span.end()
        work = attempt.release()
        if work is not None:
            self._releases.append(released := asyncio.Event())
            self._state.spawn(_note_release(work, released))

    def _close(self) -> None:
        """Release all attempts, and drop the references to them to avoid reference cycles."""
        if self._timer is not None:
            self._timer.cancel()
        self._state.delivering = self._state.hedged = None
        for attempt in self._live:
            self._release(attempt)
        self._live.clear()
        self._first = self._winner = None


async def _note_release(work: Coroutine[None, None, None], released: asyncio.Event) -> None:
    try:
        await work
    finally:
        released.set()

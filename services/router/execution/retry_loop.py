"""Attempt after attempt at one request until one of them comes to its end.

A failed attempt is repeated on other workers from (prompt + emitted tokens); seeds, penalties and the
token limit count from the first emitted token, so the client sees a pause and the same text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial

from opentelemetry.trace import INVALID_SPAN, Span

from libs.common.cluster.worker_record import Role
from libs.common.rpc import tracing
from services.router.execution.attempt import Attempt
from services.router.execution.attempt_types import FINISH_NONE, AttemptSpec, TokenBatch, WorkerFailed
from services.router.execution.context import RouterContext
from services.router.execution.dispatcher import Assignment, PlacementQuery
from services.router.execution.failover import RequestFailover
from services.router.execution.hedging import Contender, run_hedged
from services.router.execution.output_processor import OutputProcessor
from services.router.execution.request_stats import RequestStats
from services.router.execution.sessions import SessionPlacement
from services.router.placement.decision_json import span_attributes
from services.router.placement.types import PlacementDecision
from services.router.request.prompt import default_seed
from services.router.request.types import Caller
from slipstream import bounds, errors
from slipstream.bound import shown
from slipstream.v1 import common_pb2

log = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.2
# How often a request under suspicion looks whether its turn has come.
_TRIAL_PAUSE_S = 0.02


@dataclass(slots=True)
class RetryLoop:
    """One request's attempts. `take` is given each batch, after which `output` holds its tokens; `take_now`
    tokens that came with nothing else, where nobody has to wait: else it is False, and `take` gets them."""

    cluster: RouterContext
    caller: Caller
    request_id: str
    job: AttemptSpec
    hashes: Sequence[bytes]  # of the prompt's full blocks
    known: SessionPlacement
    lifeline: RequestFailover
    output: OutputProcessor
    trail: RequestStats
    take: Callable[[TokenBatch], Awaitable[None]]
    take_now: Callable[[Sequence[int]], bool]
    spawn: Callable[[Coroutine[None, None, None]], None]  # runs what must outlive a cancel
    decision: PlacementDecision | None = None  # of the latest attempt

    async def run(self) -> tuple[Assignment, common_pb2.FinishReason.ValueType]:
        """Where the attempt ran that came to the end, and why it ended. Raises what the client is told."""
        lifeline = self.lifeline
        while True:
            self.trail.attempts += 1
            routed = await self._place()
            while not lifeline.may_begin(routed.place):
                await asyncio.sleep(_TRIAL_PAUSE_S)
                routed = await self._place()
            emitted = len(self.output.tokens)
            try:
                async with lifeline.attempt(routed.place):
                    return await self._try(routed)
            except WorkerFailed as failure:
                log.warning("%s attempt %d: %s", self.request_id, self.trail.attempts, failure.error)
                if failure.moved:
                    self.cluster.counters.add("slipstream_moves_total")
                lifeline.failed(failure, new_tokens=len(self.output.tokens) - emitted)

    async def _place(self) -> Assignment:
        """Workers for the next attempt. Only a request that was placed before waits for workers, and not
        one that was refused for load before its first token."""
        fleet, clock = self.cluster.fleet, self.cluster.clock
        failed, error = self.lifeline.avoid, self.lifeline.error
        overloaded = isinstance(error, errors.Overloaded) and not self.output.tokens
        give_up_s = clock() + (self.cluster.recovery_wait_s if error is not None else 0.0)
        while True:
            seen = fleet.version
            try:
                return self._decide(failed, may_skip_prefill=not overloaded)
            except errors.Unavailable:
                if overloaded and error is not None:
                    raise error from None
                if clock() >= give_up_s:
                    raise
            # Those that failed may be better than nobody, a moment later.
            failed.clear()
            try:
                async with asyncio.timeout(_RETRY_PAUSE_S):
                    await fleet.wait_changed(seen)
            except TimeoutError:
                pass

    def _decide(self, failed: set[str], *, may_skip_prefill: bool) -> Assignment:
        fleet, job = self.cluster.fleet, self.job
        pinned = self._pinned()
        if pinned:
            link = fleet.find(Role.PREFILL, pinned)
            if link is None or not link.ready or link.fingerprint != job.fingerprint:
                raise bounds.PINNED_WORKER.refused(instance=shown(pinned))
        ask = PlacementQuery(
            tenant=self.caller.tenant,
            fingerprint=job.fingerprint,
            prompt_tokens=len(job.prompt) + len(self.output.tokens),
            hashes=self.hashes,
            seed=default_seed(job.request_id),
            session=self.known.placement,
            known_tokens=self.known.stored_tokens,
            max_output_tokens=job.sampling.max_tokens - len(self.output.tokens),
            without=failed,
            pinned_prefill=pinned,
            may_skip_prefill=may_skip_prefill,
        )
        choose = self._choose_in_span if tracing.enabled() else self.cluster.dispatcher.choose
        routed = choose(ask)
        self._note(routed)
        return routed

    def _choose_in_span(self, ask: PlacementQuery) -> Assignment:
        with tracing.span("placement"):
            routed = self.cluster.dispatcher.choose(ask)
            tracing.annotate(**span_attributes(routed.decision))
        return routed

    def _pinned(self) -> str:
        """The prefill worker that the caller wants for the first attempt, if any."""
        return self.caller.pinned_prefill or "" if self.trail.attempts == 1 else ""

    def _note(self, routed: Assignment) -> None:
        self.decision = routed.decision
        self.trail.placed(routed.decision, transport=routed.place.decode.transport)

    async def _try(self, routed: Assignment) -> tuple[Assignment, common_pb2.FinishReason.ValueType]:
        """One attempt; when its prefill is slow in the bad tail, raced by a second one."""
        attempt = self._attempt(routed)
        lifeline, began_s = self.lifeline, self.cluster.clock()
        try:
            wait_s = None
            if not self._pinned():
                wait_s = lifeline.hedge_after_s(routed.place, len(self.job.prompt) + len(self.output.tokens))
            if wait_s is None:
                # What it costs to learn of the attempt is for after its prompt was written.
                attempt.on_begun = routed.begins
                attempt.take_first = self.take_now
                batches = attempt.batches()
            else:
                routed.begins()
                winner, batches = await self._race(Contender(attempt, routed), wait_s)
                attempt, routed = winner.attempt, winner.routed
            attempt.take_tokens = partial(self._pass_on, routed)
            try:
                async for batch in batches:
                    self.trail.took(batch)
                    if batch.prefill_ms is not None:
                        lifeline.prefilled(routed.place, self.cluster.clock() - began_s)
                    routed.took(batch)
                    lifeline.took(batch, routed.place)
                    if not batch.shown:
                        await self.take(batch)  # it may wait for its client: nobody else is to wait for that
                    if self.output.stopped:
                        if batch.finish == FINISH_NONE:
                            self.trail.add_stats(await attempt.stop())
                        return routed, common_pb2.FINISH_REASON_STOP
                    if batch.finish != FINISH_NONE:
                        return routed, batch.finish
            finally:
                await batches.aclose()
            raise WorkerFailed(errors.Unavailable("decode ended without a reason"), routed.place.decode.key)
        except (WorkerFailed, errors.SlipstreamError, asyncio.CancelledError) as failure:
            error = failure.error if isinstance(failure, WorkerFailed) else failure
            tracing.failed(error, attempt.span)
            raise
        finally:
            self._release(attempt)

    async def _race(
        self, first: Contender, wait_s: float
    ) -> tuple[Contender, AsyncGenerator[TokenBatch, None]]:
        """As `race`: a second attempt begins when the first one brought nothing for `wait_s`."""
        lifeline = self.lifeline
        hedge: Contender | None = None

        def second() -> Contender | None:
            nonlocal hedge
            hedge = self._hedge(first.routed)
            return hedge

        def drop(loser: Contender, failure: WorkerFailed | None) -> None:
            if hedge is not None:
                other = hedge if loser is first else first
                lifeline.lost(loser.routed.place, but=other.routed.place, failure=failure)
            if failure is not None:
                tracing.failed(failure.error, loser.attempt.span)
            self._release(loser.attempt)

        winner, batches = await run_hedged(first, wait_s=wait_s, second=second, drop=drop)
        if self.decision is not winner.routed.decision:  # a hedge was placed later, and lost
            self._note(winner.routed)
        return winner, batches

    def _pass_on(self, routed: Assignment, tokens: Sequence[int]) -> bool:
        """Whether tokens were taken while the next batch is waited for."""
        if not self.take_now(tokens):
            return False
        batch = TokenBatch(tokens)
        self.trail.took(batch)
        self.lifeline.took(batch, routed.place)
        return True

    def _attempt(self, routed: Assignment, *, hedge: bool = False) -> Attempt:
        self.cluster.counters.add("slipstream_attempts_total")
        return Attempt(
            self.trail.attempts,
            self.job,
            routed.place,
            tuple(self.output.tokens),
            self.cluster.clock,
            self.cluster.silence_s,
            leave=self.lifeline.leave,
            defer_decode=hedge,
            span=self._span(routed, hedge=hedge) if tracing.enabled() else INVALID_SPAN,
        )

    def _span(self, routed: Assignment, *, hedge: bool) -> Span:
        place = routed.place
        return tracing.begin(
            "attempt",
            request_id=self.job.request_id,
            attempt=self.trail.attempts,
            prefill=place.prefill.worker.instance if place.prefill is not None else "",
            decode=place.decode.worker.instance,
            emitted_tokens=len(self.output.tokens),
            hedge=hedge,
        )

    def _hedge(self, slow: Assignment) -> Contender | None:
        """A second attempt on another prefill worker, if there is one and the budget allows it."""
        assert slow.place.prefill is not None
        if not self.lifeline.may_hedge():
            return None
        without = self.lifeline.avoid | {slow.place.prefill.key}
        try:
            routed = self._decide(without, may_skip_prefill=False)
        except errors.SlipstreamError:
            return None
        routed.begins()
        self.lifeline.spend_hedge()
        self.lifeline.hedged(routed.place)
        self.trail.attempts += 1
        self.cluster.counters.add("slipstream_hedges_total")
        return Contender(self._attempt(routed, hedge=True), routed)

    def _release(self, attempt: Attempt) -> None:
        attempt.span.end()
        # Not awaited: the client need not wait for it, and a cancel must not cut it short.
        rest = attempt.release()
        if rest is not None:
            self.spawn(rest)

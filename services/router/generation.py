"""The life of one request: encode, place, attempt, show tokens, finish; and again elsewhere on failure.

A failed attempt is repeated on other workers from (prompt + emitted tokens); seeds, penalties and the
token limit count from the first emitted token, so the client sees a pause and the same text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from libs.common import bounds, errors
from libs.common.block_hash import HashChain, pack_hashes, tenant_salt
from libs.common.bound import shown
from libs.common.telemetry import Counters, span, tracing
from libs.common.worker_record import Role
from services.router.attempt import FINISH_NONE, SILENCE_S, Attempt, Batch, Job, WorkerFailed
from services.router.continuity import Continuity, Lifeline, content_of
from services.router.dispatch import Ask, Dispatcher, Routed
from services.router.event_pipe import EventPipe
from services.router.fleet import RouterFleet
from services.router.model_card import ModelCard
from services.router.output import Output
from services.router.placement_json import span_attributes
from services.router.placement_types import Decision
from services.router.prompt import Prompt, PromptDraft, default_seed
from services.router.race import Runner, race
from services.router.request import Caller, Generation
from services.router.sessions import Known, Sessions
from services.router.token_memory import TokenMemory
from services.router.trail import TrailBook
from slipstream.v1 import common_pb2, router_pb2

log = logging.getLogger(__name__)

# How long a request that was already placed once waits for a worker to come (back).
RECOVERY_WAIT_S = 30.0
_RETRY_PAUSE_S = 0.2
# How often a request under suspicion looks whether its turn has come.
_TRIAL_PAUSE_S = 0.02
# Texts longer than this are encoded off the event loop.
_INLINE_CHARS = 16_384


@dataclass(frozen=True, slots=True)
class Cluster:
    """What requests are served with."""

    fleet: RouterFleet
    dispatcher: Dispatcher
    sessions: Sessions
    card: ModelCard
    counters: Counters
    clock: Callable[[], float]  # the event loop's
    wall_clock_s: Callable[[], float]
    continuity: Continuity
    recovery_wait_s: float = RECOVERY_WAIT_S
    silence_s: float = SILENCE_S
    memory: TokenMemory = field(default_factory=TokenMemory)


@dataclass(slots=True)
class GenerationRun:
    """Runs one request. `worker_request_id` is its name on the workers, unique among all routers."""

    cluster: Cluster
    request: Generation
    caller: Caller
    request_id: str
    worker_request_id: str
    pipe: EventPipe
    spawn: Callable[[Coroutine[None, None, None]], None]  # runs what must outlive a cancel
    decision: Decision | None = None  # of the latest attempt
    _trail: TrailBook = field(init=False)
    _output: Output = field(init=False)
    _prompt: Prompt = field(init=False)

    async def run(self) -> None:
        """Returns when `finished` was put. Raises a SlipstreamError when the request fails."""
        self._trail = TrailBook(self.cluster.clock)
        self._prompt = await self._encode()
        prompt = self._prompt
        self._output = Output(
            self.cluster.card.tokenizer,
            prompt.parser(self.request, self.cluster.card),
            forced=prompt.forced,
            thinking=prompt.thinking,
            stop_token_ids=self.cluster.card.stop_token_ids,
            with_logprobs=prompt.sampling.HasField("top_logprobs"),
            resume_after=self.request.resume_after_tokens,
        )
        await self.pipe.put(router_pb2.GenerateResponse(started=self._started()))
        finish = await self._attempt_until_done()
        for delta in self._output.finish():
            await self._show(delta)
        await self.pipe.put(router_pb2.GenerateResponse(finished=self._finished(finish)))

    # ---- before the first attempt

    async def _encode(self) -> Prompt:
        cluster = self.cluster
        draft = PromptDraft.of(self.request, cluster.card, cluster.memory, tenant=self.caller.tenant)
        if draft.new_chars <= _INLINE_CHARS:
            encoded = draft.encode()
        else:
            encoded = await asyncio.to_thread(draft.encode)
        prompt = draft.finish(encoded, request_id=self.request_id)
        cluster.counters.add("slipstream_prompt_tokens_encoded_total", prompt.encoded_tokens)
        return prompt

    def _started(self) -> router_pb2.Started:
        return router_pb2.Started(
            request_id=self.request_id,
            model=self.cluster.card.name,
            created_unix_s=int(self.cluster.wall_clock_s()),
            prompt_tokens=len(self._prompt.token_ids),
        )

    # ---- attempts

    async def _attempt_until_done(self) -> common_pb2.FinishReason.ValueType:
        fingerprint = self.cluster.fleet.fingerprint()
        if fingerprint is None:
            raise errors.Unavailable("no decode worker is ready")
        salt = tenant_salt(self.caller.tenant)
        chain, n_hashed = self._prompt.chain(
            root=fingerprint.digest, salt=salt, block_tokens=fingerprint.block_tokens
        )
        self.cluster.counters.add("slipstream_prompt_tokens_hashed_total", n_hashed)
        hashes = list(chain.hashes)
        known = self.cluster.sessions.look_up(
            self.caller.tenant, self.caller.session, hashes, block_tokens=fingerprint.block_tokens
        )
        job = Job(
            request_id=self.worker_request_id,
            epoch=known.placement.epoch,
            fingerprint=fingerprint,
            prompt=self._prompt.token_ids,
            prompt_hashes=pack_hashes(hashes),
            salt=salt,
            sampling=self._prompt.sampling,
            store_generated=self._prompt.store_generated,
            deadline_s=self.caller.deadline_s,
        )
        content = content_of(
            self._prompt.token_ids,
            job.sampling,
            tenant=self.caller.tenant,
            hashes=hashes,
            block_tokens=fingerprint.block_tokens,
        )
        lifeline = self.cluster.continuity.lifeline(content)
        try:
            routed, finish = await self._pursue(job, known, hashes, lifeline)
        except errors.Quarantined:
            self.cluster.counters.add("slipstream_quarantined_total")
            raise
        finally:
            lifeline.close()
        self._record_session(routed, chain)
        return finish

    async def _pursue(
        self, job: Job, known: Known, hashes: Sequence[bytes], lifeline: Lifeline
    ) -> tuple[Routed, common_pb2.FinishReason.ValueType]:
        """Attempt after attempt until one comes to the end; where that was, and why it ended."""
        while True:
            self._trail.attempts += 1
            routed = await self._place(job, known, hashes, lifeline)
            while not lifeline.may_begin(routed.place):
                await asyncio.sleep(_TRIAL_PAUSE_S)
                routed = await self._place(job, known, hashes, lifeline)
            emitted = len(self._output.tokens)
            try:
                with lifeline.attempt(routed.place):
                    return await self._try(job, known, hashes, routed, lifeline)
            except WorkerFailed as failure:
                log.warning("%s attempt %d: %s", self.request_id, self._trail.attempts, failure.error)
                if failure.moved:
                    self.cluster.counters.add("slipstream_moves_total")
                lifeline.failed(failure, new_tokens=len(self._output.tokens) - emitted)

    async def _place(self, job: Job, known: Known, hashes: Sequence[bytes], lifeline: Lifeline) -> Routed:
        """Workers for the next attempt. Only a request that was placed before waits for workers, and not
        one that was refused for load before its first token."""
        fleet, clock = self.cluster.fleet, self.cluster.clock
        failed, error = lifeline.avoid, lifeline.error
        overloaded = isinstance(error, errors.Overloaded) and not self._output.tokens
        give_up_s = clock() + (self.cluster.recovery_wait_s if error is not None else 0.0)
        while True:
            seen = fleet.version
            try:
                return self._decide(job, known, hashes, failed, may_skip_prefill=not overloaded)
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

    def _decide(
        self, job: Job, known: Known, hashes: Sequence[bytes], failed: set[str], *, may_skip_prefill: bool
    ) -> Routed:
        fleet = self.cluster.fleet
        pinned = self.caller.pinned_prefill or ""
        if pinned and self._trail.attempts == 1:
            link = fleet.find(Role.PREFILL, pinned)
            if link is None or not link.ready or link.fingerprint != job.fingerprint:
                raise bounds.PINNED_WORKER.refused(instance=shown(pinned))
        else:
            pinned = ""
        routed = self.cluster.dispatcher.choose(
            Ask(
                tenant=self.caller.tenant,
                fingerprint=job.fingerprint,
                prompt_tokens=len(job.prompt) + len(self._output.tokens),
                hashes=hashes,
                seed=default_seed(job.request_id),
                session=known.placement,
                known_tokens=known.stored_tokens,
                max_output_tokens=job.sampling.max_tokens - len(self._output.tokens),
                without=failed,
                pinned_prefill=pinned,
                may_skip_prefill=may_skip_prefill,
            )
        )
        self.decision = routed.decision
        if tracing():
            with span("placement", **span_attributes(routed.decision)):
                pass
        self._trail.placed(routed.decision, transport=routed.place.decode.transport)
        return routed

    async def _try(
        self, job: Job, known: Known, hashes: Sequence[bytes], routed: Routed, lifeline: Lifeline
    ) -> tuple[Routed, common_pb2.FinishReason.ValueType]:
        """One attempt; when its prefill is slow in the bad tail, raced by a second one."""
        runner = Runner(self._attempt(job, routed, lifeline), routed)
        began_s = self.cluster.clock()

        def second() -> Runner | None:
            return self._hedge(job, known, hashes, routed, lifeline)

        try:
            wait_s = lifeline.hedge_after_s(routed.place, len(job.prompt) + len(self._output.tokens))
            drop = self._release
            batches = race(runner, wait_s=wait_s, second=second, drop=lambda r: drop(r.attempt))
            async with aclosing(batches):
                async for runner, batch in batches:
                    if batch.prefill_ms is not None:
                        lifeline.prefilled(runner.routed.place, self.cluster.clock() - began_s)
                    self._trail.took(batch)
                    runner.routed.took(batch)
                    lifeline.took(batch, runner.routed.place)
                    await self._take(batch)
                    if self._output.stopped:
                        if batch.finish == FINISH_NONE:
                            self._trail.add_stats(await runner.attempt.stop())
                        return runner.routed, common_pb2.FINISH_REASON_STOP
                    if batch.finish != FINISH_NONE:
                        return runner.routed, batch.finish
            decode = runner.routed.place.decode.key
            raise WorkerFailed(errors.Unavailable("decode ended without a reason"), decode)
        finally:
            self._release(runner.attempt)

    def _attempt(self, job: Job, routed: Routed, lifeline: Lifeline, *, hedge: bool = False) -> Attempt:
        self.cluster.counters.add("slipstream_attempts_total")
        return Attempt(
            self._trail.attempts,
            job,
            routed.place,
            tuple(self._output.tokens),
            self.cluster.clock,
            self.cluster.silence_s,
            leave=lifeline.leave,
            defer_decode=hedge,
        )

    def _hedge(
        self, job: Job, known: Known, hashes: Sequence[bytes], slow: Routed, lifeline: Lifeline
    ) -> Runner | None:
        """A second attempt on another prefill worker, if there is one and the budget allows it."""
        assert slow.place.prefill is not None
        if not lifeline.spend_hedge():
            return None
        without = lifeline.avoid | {slow.place.prefill.key}
        try:
            routed = self._decide(job, known, hashes, without, may_skip_prefill=False)
        except errors.SlipstreamError:
            return None
        self._trail.attempts += 1
        self.cluster.counters.add("slipstream_hedges_total")
        return Runner(self._attempt(job, routed, lifeline, hedge=True), routed)

    def _release(self, attempt: Attempt) -> None:
        # Not awaited: the client need not wait for it, and a cancel must not cut it short.
        rest = attempt.release()
        if rest is not None:
            self.spawn(rest)

    async def _take(self, batch: Batch) -> None:
        for delta in self._output.push(batch.tokens, batch.logprobs):
            await self._show(delta)

    async def _show(self, delta: router_pb2.Delta) -> None:
        await self.pipe.put(router_pb2.GenerateResponse(delta=delta))

    # ---- after the last attempt

    def _record_session(self, routed: Routed, chain: HashChain) -> None:
        hashes = list(chain.hashes)
        if self._prompt.store_generated:
            # The last token was never run through the model: its block is not complete.
            chain.extend(self._output.tokens[:-1])
            hashes = list(chain.hashes)
        self.cluster.sessions.record(
            self.caller.tenant,
            self.caller.session,
            prefill=self._trail.prefill,
            decode=routed.place.decode.worker.instance,
            kvstore=self._trail.kvstore,
            hashes=hashes,
        )
        self.cluster.dispatcher.ended(routed, hashes, tenant=self.caller.tenant)

    def _finished(self, finish: common_pb2.FinishReason.ValueType) -> router_pb2.Finished:
        if finish == common_pb2.FINISH_REASON_STOP and self._output.saw_tool_calls:
            finish = common_pb2.FINISH_REASON_TOOL_CALLS
        usage = self._trail.usage(
            prompt_tokens=len(self._prompt.token_ids),
            completion_tokens=len(self._output.tokens),
            reasoning_tokens=self._output.reasoning_tokens,
        )
        counters = self.cluster.counters
        counters.add("slipstream_prompt_tokens_total", usage.prompt_tokens)
        counters.add("slipstream_cached_tokens_total", usage.cached_tokens)
        counters.add("slipstream_completion_tokens_total", usage.completion_tokens)
        counters.add("slipstream_ttft_ms_total", self._trail.ttft_ms)
        return router_pb2.Finished(
            finish_reason=finish, usage=usage, trail=self._trail.message(usage.completion_tokens)
        )

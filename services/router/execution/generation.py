"""The life of one request: encode, attempt (pursuit.py) and show tokens, finish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial

from libs.common.block_hash import HashChain, tenant_salt
from libs.common.enum_names import finish_name
from libs.common.rpc import tracing
from services.router.execution.attempt_types import AttemptSpec, TokenBatch
from services.router.execution.context import RouterContext
from services.router.execution.dispatcher import Assignment
from services.router.execution.event_queue import ResponseQueue
from services.router.execution.failover import content_of
from services.router.execution.output_processor import OutputProcessor
from services.router.execution.request_stats import RequestStats
from services.router.execution.retry_loop import RetryLoop
from services.router.placement.types import PlacementDecision
from services.router.request.prompt import Prompt, PromptDraft
from services.router.request.types import Caller, GenerationRequest
from services.router.workers.prompt_delta import OutgoingPrompt
from slipstream import errors
from slipstream.v1 import common_pb2, router_pb2

log = logging.getLogger(__name__)

# Texts longer than this are encoded off the event loop.
_INLINE_CHARS = 16_384

# Of tokens that waited for a slow reader, those that are put into the pipe at once.
_PUT_TOKENS = 256


async def encode_prompt(
    cluster: RouterContext, request: GenerationRequest, *, tenant: str, request_id: str
) -> Prompt:
    """The ids of a valid request. Raises InvalidArgument when they do not fit the context."""
    draft = PromptDraft.of(request, cluster.card, cluster.memory, tenant=tenant)
    if draft.new_chars <= _INLINE_CHARS:
        encoded = draft.encode()
    else:
        encoded = await asyncio.to_thread(draft.encode)
    prompt = draft.finish(encoded, request_id=request_id)
    cluster.counters.add("slipstream_prompt_tokens_encoded_total", prompt.encoded_tokens)
    return prompt


@dataclass(slots=True)
class GenerationTask:
    """Runs one request. `worker_request_id` is its name on the workers, unique among all routers."""

    cluster: RouterContext
    request: GenerationRequest
    caller: Caller
    request_id: str
    worker_request_id: str
    pipe: ResponseQueue
    spawn: Callable[[Coroutine[None, None, None]], None]  # runs what must outlive a cancel
    began_s: float  # when it came, on the cluster's clock
    _pursuit: RetryLoop | None = None  # while there are attempts
    _decision: PlacementDecision | None = None  # of the last one
    _trail: RequestStats = field(init=False)
    _output: OutputProcessor = field(init=False)
    _prompt: Prompt = field(init=False)

    @property
    def decision(self) -> PlacementDecision | None:
        """Where the latest attempt runs and why."""
        return self._pursuit.decision if self._pursuit is not None else self._decision

    async def run(self) -> None:
        """Returns when `finished` was put. Raises a SlipstreamError when the request fails."""
        self._trail = RequestStats(self.cluster.clock, began_s=self.began_s)
        await self.cluster.turns.take()
        prompt = self._prompt = await encode_prompt(
            self.cluster, self.request, tenant=self.caller.tenant, request_id=self.request_id
        )
        self._output = OutputProcessor(
            self.cluster.card.tokenizer,
            prompt.parser(self.request, self.cluster.card),
            forced=prompt.forced,
            thinking=prompt.thinking,
            stop_token_ids=self.cluster.card.stop_token_ids,
            with_logprobs=prompt.sampling.HasField("top_logprobs"),
            resume_after=self.request.resume_after_tokens,
        )
        await self.pipe.put(self._started())
        finish = await self._attempt_until_done()
        await self._show(self._output.finish())
        await self.pipe.put(self._finished(finish))

    def _started(self) -> router_pb2.GenerateEvent:
        event = router_pb2.GenerateEvent()
        started = event.started
        started.request_id = self.request_id
        started.model = self.cluster.card.name
        started.created_unix_s = int(self.cluster.wall_clock_s())
        started.prompt_tokens = len(self._prompt.token_ids)
        return event

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
        job = AttemptSpec(
            request_id=self.worker_request_id,
            epoch=known.placement.epoch,
            fingerprint=fingerprint,
            prompt=OutgoingPrompt(
                self._prompt.token_ids,
                hashes,
                root=fingerprint.digest,
                salt=salt,
                block_tokens=fingerprint.block_tokens,
            ),
            sampling=self._prompt.sampling,
            store_generated=self._prompt.store_generated,
            deadline_s=self.caller.deadline_s,
        )
        content = partial(
            content_of,
            self._prompt.token_ids,
            job.sampling,
            tenant=self.caller.tenant,
            hashes=hashes,
            block_tokens=fingerprint.block_tokens,
        )
        lifeline = self.cluster.continuity.lifeline(content)
        pursuit = self._pursuit = RetryLoop(
            self.cluster,
            self.caller,
            self.request_id,
            job,
            hashes,
            known,
            lifeline,
            self._output,
            self._trail,
            take=self._take,
            take_now=self._take_now,
            spawn=self.spawn,
        )
        try:
            routed, finish = await pursuit.run()
        except errors.Quarantined:
            self.cluster.counters.add("slipstream_quarantined_total")
            raise
        finally:
            lifeline.close()
            self._pursuit, self._decision = None, pursuit.decision  # each holds the other
        self._record_session(routed, chain)
        return finish

    async def _take(self, batch: TokenBatch) -> None:
        tokens, logprobs = batch.tokens, batch.logprobs
        while len(tokens) > _PUT_TOKENS:
            await self._show(self._output.push(tokens[:_PUT_TOKENS], logprobs[:_PUT_TOKENS]))
            tokens, logprobs = tokens[_PUT_TOKENS:], logprobs[_PUT_TOKENS:]
        await self._show(self._output.push(tokens, logprobs))

    async def _show(self, deltas: Sequence[router_pb2.GenerateEvent]) -> None:
        for delta in deltas:
            if not self.pipe.has_room:
                await self.pipe.room()
            self.pipe.put_delta(delta)

    def _take_now(self, tokens: Sequence[int]) -> bool:
        if self._output.may_stop or len(tokens) > _PUT_TOKENS or not self.pipe.has_room:
            return False
        for event in self._output.push(tokens):
            self.pipe.put_delta(event, alone=True)
        return True

    # ---- after the last attempt

    def _record_session(self, routed: Assignment, chain: HashChain) -> None:
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

    def _finished(self, finish: common_pb2.FinishReason.ValueType) -> router_pb2.GenerateEvent:
        if finish == common_pb2.FINISH_REASON_STOP and self._output.saw_tool_calls:
            finish = common_pb2.FINISH_REASON_TOOL_CALLS
        trail, completion_tokens = self._trail, len(self._output.tokens)
        usage = trail.usage(
            prompt_tokens=len(self._prompt.token_ids),
            completion_tokens=completion_tokens,
            reasoning_tokens=self._output.reasoning_tokens,
        )
        counters = self.cluster.counters
        counters.add("slipstream_prompt_tokens_total", usage.prompt_tokens)
        counters.add("slipstream_cached_tokens_total", usage.cached_tokens)
        counters.add("slipstream_completion_tokens_total", completion_tokens)
        counters.add("slipstream_ttft_ms_total", trail.ttft_ms)
        if tracing.enabled():
            tracing.annotate(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                tokens=completion_tokens,
                ttft_ms=trail.ttft_ms,
                attempts=trail.attempts,
                finish=finish_name(finish),
            )
        event = router_pb2.GenerateEvent()
        finished = event.finished
        finished.finish_reason = finish
        # A message that is given to another one is written down and read again for it; a copy is a copy.
        finished.usage.CopyFrom(usage)
        if self.pipe.wants_trail:
            finished.trail.CopyFrom(trail.message(completion_tokens))
        return event

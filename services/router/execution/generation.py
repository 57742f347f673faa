"""Runs one admitted request: encode the prompt, run attempts (retry_loop.py), write the final event."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from opentelemetry.trace import SpanContext

from libs.common.block_hash import HashChain
from libs.common.telemetry import tracing
from services.router.admission.gate import AdmissionTicket
from services.router.execution.attempt_types import AttemptSpec
from services.router.execution.attempts.hedging import AttemptEnd
from services.router.execution.attempts.retry_loop import run_attempts
from services.router.execution.attempts.worker_selection import await_fingerprint
from services.router.execution.context import RouterContext
from services.router.execution.event_queue import ResponseQueue
from services.router.execution.output_processor import OutputProcessor
from services.router.execution.policies.context_room import OutputRoom, list_output_lengths
from services.router.execution.policies.job_holds import JobHold
from services.router.execution.prompt_encoding import encode_prompt
from services.router.execution.request_state import RequestState
from services.router.execution.request_stats import CountedTokens, StatsRecorder
from services.router.metering.metering import MeteredRequest
from services.router.placement.types import PlacementDecision
from services.router.recording.timeline import RequestTimeline
from services.router.request.prompt import Prompt
from services.router.request.prompt_rows import PromptRows
from services.router.request.types import Caller, ChatInput, GenerationRequest
from services.router.request.validation import prompt_field
from services.router.workers.prompt_delta import OutgoingPrompt
from slipstream import errors
from slipstream.enum_names import FINISH_REASONS
from slipstream.sampling import OutputConstraint
from slipstream.v1 import common_pb2, router_pb2


@dataclass(slots=True)
class GenerationTask:
    """Runs one request. `worker_request_id` is its id on the workers, unique among all routers."""

    context: RouterContext
    request: GenerationRequest
    caller: Caller
    request_id: str
    worker_request_id: str
    sink: ResponseQueue
    ticket: AdmissionTicket | None
    constraint: OutputConstraint | None
    spawn: Callable[[Coroutine[None, None, None]], None]  # runs work that a cancel must not stop
    began_s: float  # when the request arrived, on the context's clock
    timeline: RequestTimeline = field(default_factory=RequestTimeline)
    metered: MeteredRequest | None = None
    hold: JobHold | None = None  # of a job
    counted: CountedTokens = field(default_factory=CountedTokens)
    _decision: PlacementDecision | None = None  # of the last attempt
    _state: RequestState | None = None  # while attempts run
    _is_closed: bool = False
    _admitted_s: float = 0.0
    _span: SpanContext | None = None  # the request's, where it is exported
    _prompt: Prompt = field(init=False)
    _chain: HashChain = field(init=False)  # of the prompt, then of the whole context

    @property
    def decision(self) -> PlacementDecision | None:
        """The placement of the latest attempt."""
        return self._state.decision if self._state is not None else self._decision

    def close(self) -> None:
        """Write no more events: the task is about to be cancelled."""
        self._is_closed = True
        if self._state is not None:
            self._state.close()

    @property
    def is_suspended(self) -> bool:
        """Whether the request waits for a client that reads nothing, and its workers hold nothing."""
        return self._state is not None and self._state.is_suspended

    def suspend(self) -> None:
        """Leave the workers until the client reads again."""
        if self._state is not None:
            self._state.suspend()

    async def run(self) -> None:
        """Run the request until `finished` is written. Raises a SlipstreamError when the request fails."""
        context = self.context
        self._admitted_s = context.clock()
        self.timeline.admitted(self._admitted_s)
        self._span = tracing.exported_context()
        await context.start_pacer.acquire(self.caller.tenant)
        self._prompt = await encode_prompt(
            context,
            self.request,
            tenant=self.caller.tenant,
            request_id=self.request_id,
            constraint=self.constraint,
        )
        self.timeline.prompt_tokens = len(self._prompt.token_ids)
        self.timeline.note("encoded", tokens=self._prompt.encoded_tokens)
        state = self._make_state(await await_fingerprint(context))
        state.is_closed = self._is_closed
        if context.failover.quarantine.has_suspects:
            state.suspect.content = state.content()
            context.failover.quarantine.check(state.suspect.content)
            context.failover.quarantine.restore_strikes(state.suspect)
        self._state = self.sink.producer = state
        try:
            end = await run_attempts(state)
            if self.sink.is_full:  # the answer waits for its client, and no longer for a worker
                state.leave_admission()
            events = await state.last_events()
            events += state.output.finish()
            self._record_session(state, end)
            events.append(self._finished(state, end.finish))
            self.sink.write(events)
        except errors.Quarantined:
            context.counters.add("slipstream_quarantined_total")
            raise
        finally:
            state.stats.count_answer(len(state.output.tokens))  # also of an answer that ended early
            if self.metered is not None and self.metered.usage is None and state.output.tokens:
                self.metered.usage = self._usage(state)
            state.end_move()
            self.sink.producer = None
            self._state, self._decision = None, state.decision

    def _make_state(self, fingerprint: common_pb2.Fingerprint) -> RequestState:
        context, outgoing = self.context, self._hash_prompt(fingerprint)
        hashes = list(outgoing.hashes)
        session = context.sessions.look_up(
            self.caller.tenant, self.caller.session, hashes, block_tokens=fingerprint.block_tokens
        )
        return RequestState(
            context=context,
            caller=self.caller,
            request_id=self.request_id,
            spec=self._make_spec(fingerprint, outgoing, epoch=session.placement.epoch),
            hashes=hashes,
            session=session,
            output=self._make_output(),
            stats=self._make_stats(),
            sink=self.sink,
            timeline=self.timeline,
            ticket=self.ticket,
            spawn=self.spawn,
            hold=self.hold,
            started=self._started(),
            prompt_rows=self._prompt_rows(),
        )

    def _hash_prompt(self, fingerprint: common_pb2.Fingerprint) -> OutgoingPrompt:
        """The prompt with the hashes of its blocks; the chain follows the whole context from here on."""
        prompt, salts, block_tokens = self._prompt, self.context.salts, fingerprint.block_tokens
        salt = salts.of_tenant(self.caller.tenant)
        shared = salts.shared(prompt.token_ids, block_tokens=block_tokens)
        self._chain, n_hashed = prompt.chain(
            root=fingerprint.digest, salt=salt, block_tokens=block_tokens, shared=shared
        )
        self.context.counters.add("slipstream_prompt_tokens_hashed_total", n_hashed)
        return OutgoingPrompt(
            prompt.token_ids,
            list(self._chain.hashes),
            root=fingerprint.digest,
            salt=salt,
            block_tokens=block_tokens,
            shared=shared,
        )

    def _make_stats(self) -> StatsRecorder:
        return StatsRecorder(
            self.context.clock,
            began_s=self.began_s,
            admitted_s=self._admitted_s,
            counters=self.context.counters,
            span=self._span,
            timeline=self.timeline,
            is_job=self.caller.is_job,
            prompt_tokens=len(self._prompt.token_ids),
            is_prompt_alone=self.request.is_prompt_alone,
            resume_after_tokens=self.request.resume_after_tokens,
            counted=self.counted,
        )

    def _make_spec(
        self, fingerprint: common_pb2.Fingerprint, prompt: OutgoingPrompt, *, epoch: int
    ) -> AttemptSpec:
        return AttemptSpec(
            request_id=self.worker_request_id,
            epoch=epoch,
            fingerprint=fingerprint,
            prompt=prompt,
            sampling=self._prompt.sampling,
            store_generated=self._prompt.store_generated,
            deadline_s=self.caller.deadline_s,
            output_room=self._output_room(),
        )

    def _output_room(self) -> OutputRoom:
        """The lengths of the answer that workers must have room for."""
        request, max_tokens = self.request, self._prompt.sampling.max_tokens
        sampling = request.sampling
        lengths = list_output_lengths(
            max_tokens,
            stated_tokens=sampling.max_tokens if sampling.max_tokens == max_tokens else None,
            is_capped=request.is_capped_by_context,
            # A resumed answer goes on behind the tokens that its client has.
            least_tokens=max(sampling.min_tokens, request.resume_after_tokens + 1),
        )
        return OutputRoom(
            lengths,
            is_open=sampling.max_tokens is None or request.is_capped_by_context,
            max_tokens_field=sampling.max_tokens_field,
            prompt_field=prompt_field(request),
        )

    def _make_output(self) -> OutputProcessor:
        card, prompt, sampling = self.context.card, self._prompt, self.request.sampling
        return OutputProcessor(
            card.tokenizer,
            prompt.parser(self.request, card),
            forced=prompt.forced,
            thinking=prompt.thinking,
            # Evals count on log probabilities of each generated token of a completion, the last one too.
            stop_token_ids=card.stop_token_ids if isinstance(self.request.input, ChatInput) else (),
            hidden_token_ids=() if sampling.ignore_eos else sampling.stop_token_ids,
            with_logprobs=prompt.sampling.HasField("top_logprobs"),
            resume_after=self.request.resume_after_tokens,
        )

    def _prompt_rows(self) -> PromptRows | None:
        if not self._prompt.sampling.HasField("prompt_logprobs"):
            return None
        return PromptRows(self._prompt.token_ids, self.context.card.tokenizer, taken=self.sink.prompt_rows)

    def _started(self) -> router_pb2.GenerateEvent:
        event = router_pb2.GenerateEvent()
        started = event.started
        started.request_id = self.request_id
        started.model = self.request.model or self.context.card.name
        started.created_unix_s = self.caller.submitted_unix_s or self.context.wall_clock_s()
        started.prompt_tokens = len(self._prompt.token_ids)
        return event

    def _describe_answer(self, usage: router_pb2.Usage, finish: str) -> None:
        """Describe the request's span by OpenTelemetry's conventions for generative AI."""
        is_chat = isinstance(self.request.input, ChatInput)
        tracing.describe(
            {
                "gen_ai.operation.name": "chat" if is_chat else "text_completion",
                "gen_ai.provider.name": "slipstream",
                "gen_ai.request.model": self.request.model or self.context.card.name,
                "gen_ai.response.model": self.context.card.name,
                "gen_ai.response.id": self.request_id,
                "gen_ai.response.finish_reasons": [finish],
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
            }
        )

    # ---- after the last attempt

    def _record_session(self, state: RequestState, end: AttemptEnd) -> None:
        if self._prompt.store_generated:
            # The model never computed the last token's KV, so the block of that token is not full.
            self._chain.extend(state.output.tokens[:-1])
        hashes = list(self._chain.hashes)
        self.context.sessions.record(
            self.caller.tenant,
            self.caller.session,
            prefill=state.stats.prefill,
            decode=end.assignment.workers.decode.worker.instance,
            kvstore=state.stats.kvstore,
            hashes=hashes,
        )
        self.context.dispatcher.ended(end.assignment, hashes, tenant=self.caller.tenant)

    def _usage(self, state: RequestState) -> router_pb2.Usage:
        """The usage of the answer until now: what its events state, and what metering charges and limits."""
        return state.stats.usage(
            completion_tokens=0 if self.request.is_prompt_alone else len(state.output.tokens),
            reasoning_tokens=state.output.reasoning_tokens,
        )

    def _finished(
        self, state: RequestState, finish: common_pb2.FinishReason.ValueType
    ) -> router_pb2.GenerateEvent:
        output, stats, is_prompt_alone = state.output, state.stats, self.request.is_prompt_alone
        if is_prompt_alone:  # it ends at its limit of 0, whatever the engine's one token was
            finish = common_pb2.FINISH_REASON_LENGTH
        elif output.stopped:
            finish = common_pb2.FINISH_REASON_STOP
        if finish == common_pb2.FINISH_REASON_STOP and output.saw_tool_calls:
            finish = common_pb2.FINISH_REASON_TOOL_CALLS
        usage = self._usage(state)
        if self.metered is not None:
            self.metered.state_cost(usage)
            self.metered.usage = usage
        stats.finish(usage, finish_reason=FINISH_REASONS.name(finish))
        self.context.counters.add("slipstream_requests_finished_total", labels=(FINISH_REASONS.name(finish),))
        if tracing.enabled():
            tracing.annotate(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                tokens=usage.completion_tokens,
                ttft_ms=stats.ttft_ms,
                attempts=stats.attempts,
                finish=FINISH_REASONS.name(finish),
            )
            self._describe_answer(usage, FINISH_REASONS.name(finish))
        event = router_pb2.GenerateEvent()
        finished = event.finished
        finished.finish_reason = finish
        finished.stop_string = "" if is_prompt_alone else output.stop_string
        # CopyFrom is faster than the constructor, which serializes and re-parses a submessage.
        finished.usage.CopyFrom(usage)
        if self.sink.wants_stats:
            finished.stats.CopyFrom(stats.message(usage.completion_tokens))
        return event

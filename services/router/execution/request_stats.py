"""Collects the statistics of one request: workers, times, cached tokens, drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentelemetry.trace import SpanContext

from libs.common.cluster.worker_record import Role
from libs.common.telemetry.counters import Counters
from services.router.execution.attempt_types import TokenBatch
from services.router.placement.types import PlacementDecision
from services.router.recording.timeline import RequestTimeline
from slipstream import errors
from slipstream.enum_names import CACHE_TIERS, TRANSPORTS
from slipstream.v1 import common_pb2, decode_pb2, router_pb2


@dataclass(slots=True)
class CountedTokens:
    """The tokens of one request that the router's counters have.

    A request that restarts after a preemption keeps it, so each token counts once.
    """

    prompt: int = 0
    cached: int = 0
    answer: int = 0


class StatsRecorder:
    """The statistics of one request over all its attempts.

    Times count from `began_s`, the request's arrival, so they include the wait for admission.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        began_s: float,
        admitted_s: float | None = None,
        counters: Counters | None = None,
        span: SpanContext | None = None,
        timeline: RequestTimeline | None = None,
        is_job: bool = False,
        prompt_tokens: int = 0,
        is_prompt_alone: bool = False,
        resume_after_tokens: int = 0,
        counted: CountedTokens | None = None,
    ) -> None:
        """`counters` get the tokens and their times; `span` is the request's there.

        No client waits for the first token of a job (`is_job`), which counts in no time until it. An answer
        that is its prompt alone (`is_prompt_alone`) has no token, though the engine makes one. The prompt and
        the first `resume_after_tokens` of a resumed answer counted at the router that began it.
        """
        self.attempts = 0
        self.prefill = ""
        self.decode = ""
        self.kvstore = ""
        self.ttft_ms = 0.0
        self._clock = clock
        self._began_s = began_s
        self._admitted_s = began_s if admitted_s is None else admitted_s
        self._counters = counters or Counters()
        self._span = span
        self._timeline = timeline or RequestTimeline()
        self._is_job = is_job
        self._prompt_tokens = prompt_tokens
        self._is_prompt_alone = is_prompt_alone
        self._counted = counted or CountedTokens()
        self._counted.answer = max(self._counted.answer, resume_after_tokens)
        self._is_resumed = bool(resume_after_tokens)
        self._first_token_s: float | None = None
        self._first_attempt = 0
        self._first_prefill = ""  # the prefill worker of that attempt
        self._last_token_s = 0.0
        self._transport = "none"
        self._reason = ""
        self._cached: Sequence[common_pb2.CachedTokens] = ()
        self._stats: decode_pb2.SequenceStats | None = None  # the sum over all sequences

    def placed(self, decision: PlacementDecision, *, transport: str) -> None:
        """Record the placement of the latest attempt."""
        self.prefill, self.decode, self.kvstore = decision.prefill, decision.decode, decision.kvstore
        self._transport = transport
        self._reason = decision.reason

    def observe(self, batch: TokenBatch, *, answer_tokens: int) -> None:
        """Record the arrival of a batch, with which the answer has so many tokens."""
        if batch.tokens:
            now_s = self._clock()
            if self._first_token_s is None:
                self._first_token_s = now_s
                self._first_attempt, self._first_prefill = self.attempts, self.prefill
                self.ttft_ms = (now_s - self._began_s) * 1e3
                if not self._is_job:
                    self._observe("slipstream_time_to_first_token_seconds", now_s - self._began_s)
                    self._observe("slipstream_request_prefill_seconds", now_s - self._admitted_s)
                # Only the first attempt counts: later ones find the KV that it computed.
                self._cached = list(batch.cached or ())
                self._count_prompt()
            else:
                n_tokens = len(batch.tokens)
                gap_s = (now_s - self._last_token_s) / n_tokens
                self._counters.observe("slipstream_inter_token_latency_seconds", gap_s, count=n_tokens)
            self._last_token_s = now_s
            self._timeline.tokens(now_s, len(batch.tokens))
            self.count_answer(answer_tokens)
        if batch.stats is not None:
            self.add_stats(batch.stats)

    def count_answer(self, n_tokens: int) -> None:
        """Count the tokens that the answer has and had not before. Those of a client that is gone count."""
        new_tokens = n_tokens - self._counted.answer
        if new_tokens > 0 and not self._is_prompt_alone:
            self._counted.answer = n_tokens
            self._counters.add("slipstream_completion_tokens_total", new_tokens)

    def _count_prompt(self) -> None:
        """Count the prompt, and those of its cached tokens that are known now."""
        if self._is_resumed:
            return
        counted, cached_tokens = self._counted, self._cached_tokens
        self._counters.add("slipstream_prompt_tokens_total", self._prompt_tokens - counted.prompt)
        counted.prompt = self._prompt_tokens
        if cached_tokens > counted.cached:
            self._counters.add("slipstream_cached_tokens_total", cached_tokens - counted.cached)
            counted.cached = cached_tokens

    def add_stats(self, stats: decode_pb2.SequenceStats | None) -> None:
        """Add a decode worker's statistics of a finished sequence."""
        if stats is None:
            return
        self._stats = stats if self._stats is None else _total(self._stats, stats)
        if stats.cached and self.attempts == self._first_attempt:
            self._cached = list(stats.cached)
            self._count_prompt()

    def finish(self, usage: router_pb2.Usage, *, finish_reason: str) -> None:
        """Count the lengths and times of a request that ends with this usage."""
        counters = self._counters
        self.count_answer(usage.completion_tokens)
        counters.observe("slipstream_request_prompt_tokens", usage.prompt_tokens)
        counters.observe("slipstream_request_completion_tokens", usage.completion_tokens)
        stats = self._stats or decode_pb2.SequenceStats()
        self._timeline.succeeded(
            finish_reason=finish_reason,
            cached={self._source(item.tier): item.tokens for item in usage.cached},
            cached_tokens=usage.cached_tokens,
            drafted_tokens=stats.proposed_drafts,
            accepted_tokens=stats.accepted_drafts,
        )
        self._observe("slipstream_request_duration_seconds", self._clock() - self._began_s)
        self._observe("slipstream_request_decode_seconds", self._decode_s)

    def usage(self, *, completion_tokens: int, reasoning_tokens: int) -> router_pb2.Usage:
        """The token counts for the client."""
        return router_pb2.Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=self._cached_tokens,
            cached=self._cached,
            reasoning_tokens=reasoning_tokens,
        )

    def message(self, completion_tokens: int) -> router_pb2.RequestStats:
        """The statistics for the client."""
        stats = self._stats if self._stats is not None else decode_pb2.SequenceStats()
        return router_pb2.RequestStats(
            prefill_worker=self.prefill,
            decode_worker=self.decode,
            kvstore=self.kvstore,
            ttft_ms=self.ttft_ms,
            decode_ms=self._decode_s * 1e3,
            kv_bytes_pulled=stats.kv_bytes_pulled,
            transport=TRANSPORTS.value(self._transport),
            decode_steps=stats.decode_steps,
            proposed_drafts=stats.proposed_drafts,
            accepted_drafts=stats.accepted_drafts,
            acceptance_length=acceptance_length(stats),
            drafted_steps=stats.drafted_steps,
            attempts=self.attempts,
            reason=self._reason,
        )

    def _source(self, tier: common_pb2.CacheTier.ValueType) -> str:
        """Where cached KV was: a tier's name, or the role of the worker that had it in its own pages."""
        if tier != common_pb2.CACHE_TIER_WORKER:
            return CACHE_TIERS.name(tier)
        return (Role.PREFILL if self._first_prefill else Role.DECODE).value

    @property
    def _cached_tokens(self) -> int:
        """Cached tokens of the prompt, which they never exceed."""
        return min(self._prompt_tokens, sum([item.tokens for item in self._cached]))

    @property
    def _decode_s(self) -> float:
        """The time from the first token to the last."""
        return 0.0 if self._first_token_s is None else self._last_token_s - self._first_token_s

    def _observe(self, name: str, elapsed_s: float) -> None:
        self._counters.observe(name, elapsed_s, span=self._span)


def _total(one: decode_pb2.SequenceStats, other: decode_pb2.SequenceStats) -> decode_pb2.SequenceStats:
    return decode_pb2.SequenceStats(
        generated_tokens=one.generated_tokens + other.generated_tokens,
        decode_steps=one.decode_steps + other.decode_steps,
        drafted_steps=one.drafted_steps + other.drafted_steps,
        proposed_drafts=one.proposed_drafts + other.proposed_drafts,
        accepted_drafts=one.accepted_drafts + other.accepted_drafts,
        kv_bytes_pulled=one.kv_bytes_pulled + other.kv_bytes_pulled,
    )


def acceptance_length(stats: decode_pb2.SequenceStats) -> float:
    """Tokens per step that verified drafts, with the bonus token; without drafts, tokens per step."""
    if stats.drafted_steps:
        return 1.0 + stats.accepted_drafts / stats.drafted_steps
    return stats.generated_tokens / stats.decode_steps if stats.decode_steps else 0.0


def count_end(counters: Counters, error: errors.SlipstreamError | None, *, goes_on: bool) -> None:
    """Count how a request ended; the generation has counted one that succeeded.

    `goes_on`: another router takes the request where this one drains, and counts it.
    """
    if error is None:
        return
    if is_cancelled(error, goes_on=goes_on):
        counters.add("slipstream_requests_aborted_total")
    elif isinstance(error, (errors.InvalidArgument, errors.Overloaded)):
        counters.add("slipstream_requests_refused_total")
    else:
        counters.add("slipstream_requests_failed_total")


def is_cancelled(error: errors.SlipstreamError | None, *, goes_on: bool) -> bool:
    """Whether the error is no failure: its client ended the request, or continues it at another router.

    A request whose key is revoked is Unauthenticated.
    """
    if isinstance(error, errors.Draining):
        return goes_on
    return isinstance(error, (errors.Aborted, errors.Unauthenticated))

"""The inputs of an attempt at a request (attempt.py), the messages to its workers, and what it reports."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from libs.common.block_hash import as_tokens
from services.router.execution.policies.context_room import OutputRoom
from services.router.recording.timeline import RequestTimeline
from services.router.workers.connection import WorkerConnection
from services.router.workers.decode_client import DecodeClient
from services.router.workers.prompt_delta import OutgoingPrompt
from slipstream import errors
from slipstream.enum_names import CACHE_TIERS
from slipstream.rpc.rpc_errors import from_failure
from slipstream.v1 import common_pb2, decode_pb2, prefill_pb2

FINISH_NONE = common_pb2.FINISH_REASON_UNSPECIFIED


class AttemptSpec(msgspec.Struct, frozen=True):
    """The inputs that all attempts at a request share. `deadline_s` is on the event loop's clock.

    The bound of the answer, `sampling.max_tokens`, is lower in an attempt whose workers take less.
    """

    request_id: str
    epoch: int
    fingerprint: common_pb2.Fingerprint
    prompt: OutgoingPrompt
    sampling: common_pb2.SamplingParams
    store_generated: bool
    deadline_s: float | None
    output_room: OutputRoom = OutputRoom()


class WorkerPair(msgspec.Struct, frozen=True):
    """The workers of an attempt. Without `prefill` the decode worker computes the prompt."""

    prefill: WorkerConnection | None
    decode: WorkerConnection
    decode_stream: DecodeClient
    kvstore_endpoint: str
    peer_endpoint: str = ""  # a prefill worker that serves the blocks that `prefill` lacks
    uncached_tokens: int | None = None  # the tokens that prefill is expected to compute; None = unknown

    @property
    def keys(self) -> list[str]:
        """The keys of the connections."""
        return [link.key for link in (self.prefill, self.decode) if link is not None]


class TokenBatch(msgspec.Struct, frozen=True, gc=False):
    """Tokens that arrived together. The last batch of a sequence has `finish` and `stats`."""

    tokens: Sequence[int]
    logprobs: Sequence[common_pb2.PositionLogprobs] = ()
    cached: Sequence[common_pb2.CachedTokens] | None = None  # only with the first token
    prefill_ms: float | None = None  # the prefill worker's queueing and compute time, with its first token
    is_closing: bool = False  # see OutputConstraint.is_closing
    finish: common_pb2.FinishReason.ValueType = FINISH_NONE
    stats: decode_pb2.SequenceStats | None = None


class WorkerFailed(Exception):
    """The attempt cannot continue. `worker` is the key of the failed worker's connection.

    `is_crash`: the whole worker, or its engine, crashed while it ran the attempt. `is_drain`: the worker
    drains, and nothing failed. `other_worker`: a second worker that may have caused a failed transfer.
    `silent`: the failed worker, where it stands still or takes long to crash.
    """

    def __init__(
        self,
        error: errors.SlipstreamError,
        worker: str,
        *,
        is_crash: bool = False,
        is_drain: bool = False,
        other_worker: str = "",
        silent: WorkerConnection | None = None,
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.worker = worker
        self.is_crash = is_crash
        self.is_drain = is_drain
        self.other_worker = other_worker
        self.silent = silent


def start_prefill(
    spec: AttemptSpec, workers: WorkerPair, *, attempt: int, n_emitted: int, now_s: float
) -> prefill_pb2.StartPrefill:
    """The message that starts a prefill, without its prompt."""
    start = prefill_pb2.StartPrefill()
    _write_common(start, spec, workers, attempt=attempt, now_s=now_s)
    start.decode_instance = workers.decode.worker.instance
    if workers.peer_endpoint:
        start.peer_endpoint = workers.peer_endpoint
    if n_emitted:
        start.emitted_tokens = n_emitted
    return start


def start_sequence(
    spec: AttemptSpec,
    workers: WorkerPair,
    *,
    attempt: int,
    ticket: bytes,
    emitted: Sequence[int],
    now_s: float,
) -> decode_pb2.StartSequence:
    """The message that starts a decode sequence, without its prompt. An empty ticket: without a handoff."""
    start = decode_pb2.StartSequence(ticket=ticket, store_generated=spec.store_generated)
    _write_common(start, spec, workers, attempt=attempt, now_s=now_s)
    if ticket:  # the prefill worker sends them
        start.sampling.ClearField("prompt_logprobs")
    if emitted:
        start.emitted = as_tokens(emitted).tobytes()
    return start


def _write_common(
    start: prefill_pb2.StartPrefill | decode_pb2.StartSequence,
    spec: AttemptSpec,
    workers: WorkerPair,
    *,
    attempt: int,
    now_s: float,
) -> None:
    """Set the fields of both messages in place: protobuf's constructors re-parse each submessage."""
    name = start.attempt
    name.request_id, name.attempt, name.epoch = spec.request_id, attempt, spec.epoch
    start.fingerprint.CopyFrom(spec.fingerprint)
    start.sampling.CopyFrom(spec.sampling)
    if spec.deadline_s is not None:
        start.deadline_ms = max(1, int((spec.deadline_s - now_s) * 1e3))
    start.kvstore_endpoint = workers.kvstore_endpoint
    start.salt = spec.prompt.salt
    if spec.prompt.shared.n_blocks:
        start.shared_salt, start.shared_blocks = spec.prompt.shared.salt, spec.prompt.shared.n_blocks


def without_prompt_logprobs(spec: AttemptSpec) -> AttemptSpec:
    """The inputs of attempts after all log probabilities of the prompt have arrived."""
    sampling = _copied(spec.sampling)
    sampling.ClearField("prompt_logprobs")
    return msgspec.structs.replace(spec, sampling=sampling)


def closing(spec: AttemptSpec) -> AttemptSpec:
    """The inputs of attempts after the limit of tokens has changed a token of the answer."""
    if not spec.sampling.HasField("constraint"):  # a worker states what cannot be
        return spec
    sampling = _copied(spec.sampling)
    sampling.constraint.is_closing = True
    return msgspec.structs.replace(spec, sampling=sampling)


def capped(spec: AttemptSpec, max_tokens: int) -> AttemptSpec:
    """The inputs of an attempt whose answer has at most `max_tokens`."""
    if spec.sampling.max_tokens == max_tokens:
        return spec
    sampling = _copied(spec.sampling)
    sampling.max_tokens = max_tokens
    return msgspec.structs.replace(spec, sampling=sampling)


def _copied(sampling: common_pb2.SamplingParams) -> common_pb2.SamplingParams:
    copy = common_pb2.SamplingParams()
    copy.CopyFrom(sampling)
    return copy


def attempt_name(spec: AttemptSpec, attempt: int) -> common_pb2.Attempt:
    """The attempt's name on its workers."""
    return common_pb2.Attempt(request_id=spec.request_id, attempt=attempt, epoch=spec.epoch)


def first_batch(first: prefill_pb2.FirstToken) -> TokenBatch:
    """The batch of the token that prefill made."""
    return TokenBatch(
        [first.token_id],
        logprobs=[first.logprobs] if first.HasField("logprobs") else [],
        cached=first.cached,
        prefill_ms=first.queue_ms + first.compute_ms,
        is_closing=first.is_closing,
        finish=first.finish_reason,
    )


def delta_batch(
    tokens: Sequence[int],
    delta: decode_pb2.SequenceDelta,
    cached: Sequence[common_pb2.CachedTokens] | None,
) -> TokenBatch:
    """The batch of a delta that has more than these tokens, and no failure."""
    return TokenBatch(
        tokens,
        delta.logprobs,
        cached,
        is_closing=delta.is_closing,
        finish=delta.finish_reason,
        stats=delta.stats if delta.finish_reason else None,
    )


def note_prompt_start(
    timeline: RequestTimeline, start: decode_pb2.PromptStart, *, at_s: float, attempt: int, worker: str
) -> None:
    """Note when a decode worker had pages for a prompt that it computes, and when cached KV was restored."""
    own = sum([item.tokens for item in start.cached if item.tier == common_pb2.CACHE_TIER_WORKER])
    began_s = at_s - start.restore_ms / 1e3
    timeline.note_at(began_s, "prefill_started", attempt=attempt, worker=worker, tokens=own)
    note_restored(timeline, start.cached, attempt=attempt, worker=worker)


def note_restored(
    timeline: RequestTimeline, cached: Sequence[common_pb2.CachedTokens], *, attempt: int, worker: str
) -> None:
    """Note from where a worker restored KV that it had not in its own pages."""
    for item in cached:
        if item.tier != common_pb2.CACHE_TIER_WORKER:
            tier = CACHE_TIERS.name(item.tier)
            timeline.note("restored", attempt=attempt, worker=worker, tokens=item.tokens, text=tier)


def failure_of(delta: decode_pb2.SequenceDelta) -> errors.SlipstreamError | None:
    """The error of a sequence that ended early; None for any other delta."""
    if delta.HasField("failure"):
        return from_failure(delta.failure)
    if delta.finish_reason == common_pb2.FINISH_REASON_ABORTED:
        return errors.Unavailable("decode ended the sequence")
    return None

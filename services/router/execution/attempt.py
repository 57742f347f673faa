"""One try at a request on one pair of workers: prefill, handoff to decode, tokens, release.

The ticket goes to decode as soon as prefill has opened the handoff, so decode pulls blocks while prefill
computes. An attempt is driven by its streams: their readers call it, and it pushes batches of tokens to its
listener. However the attempt ends, `release` frees it on both workers; no lease has to run out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.trace import INVALID_SPAN, Span

from libs.common.block_hash import as_tokens
from libs.common.rpc import tracing
from services.router.execution.attempt_types import (
    FINISH_NONE,
    AttemptSpec,
    TokenBatch,
    WorkerFailed,
    WorkerPair,
)
from services.router.workers.connection import TokensInFlight, WorkerConnection
from services.router.workers.prefill_client import RemotePrefill
from services.router.workers.remote_sequence import RemoteSequence
from slipstream import errors
from slipstream.rpc.rpc_errors import from_failure
from slipstream.v1 import common_pb2, decode_pb2, prefill_pb2, prefill_pb2_grpc

RELEASE_TIMEOUT_S = 10.0
# A worker that is gone or silent is asked to release too, as it may still hear; its leases do the rest.
_RELEASE_GONE_S = 1.0
# How long the statistics of a stopped sequence are waited for.
_LAST_DELTA_S = 1.0


class AttemptListener(Protocol):
    """Receives what an attempt brings. All calls are synchronous, from the streams' readers."""

    def on_batch(self, attempt: Attempt, batch: TokenBatch) -> None:
        """Tokens, in order. Nothing comes after a batch with a finish reason."""

    def on_attempt_failed(self, attempt: Attempt, failure: WorkerFailed) -> None:
        """The attempt cannot go on. Nothing comes after it."""

    def on_listener_error(self, error: Exception) -> None:
        """A call of this listener raised `error`."""

    def may_leave(self, link: WorkerConnection) -> bool:
        """Whether the sequence moves away now from a decode worker that drains."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One try, counted from 1. `begin` it once, then `release` it, always.

    With `defers_decode` the decode sequence starts only after the first token.
    """

    number: int
    spec: AttemptSpec
    workers: WorkerPair
    emitted: Sequence[int]
    listener: AttemptListener
    clock: Callable[[], float]
    defers_decode: bool = False
    span: Span = INVALID_SPAN  # ended by its owner
    _prefill: RemotePrefill | None = None
    _prefill_began: bool = False
    _prefill_tokens: TokensInFlight | None = None
    _sequence: RemoteSequence | None = None
    _decode_tokens: TokensInFlight | None = None
    _ticket: bytes = b""
    _is_decoding: bool = False  # the first token came, or none was awaited
    _is_paused: bool = False
    _is_over: bool = False
    _last_stats: asyncio.Future[decode_pb2.SequenceStats] | None = None  # while `stop` waits
    # Whether the workers were ready when the attempt began there. Later on the connection may know of a
    # death before the tokens from just before it arrive here.
    _prefill_was_ready: bool = False
    _decode_was_ready: bool = False

    def begin(self) -> None:
        """Start on the first worker. The listener is not called before the event loop's next iteration."""
        decode, prefill = self.workers.decode, self.workers.prefill
        self._decode_tokens = TokensInFlight(decode, len(self.spec.prompt) + len(self.emitted))
        decode.listeners.add(self)
        if prefill is not None:
            self._start_prefill(prefill)
        else:
            self._start_decode(b"")
            self._is_decoding = True
            self._resume_sequence()

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self._is_over

    def pause(self) -> None:
        """Push no more tokens until `resume`: they wait, joined and bounded, in the sequence."""
        self._is_paused = True
        if self._sequence is not None:
            self._sequence.pause()

    def resume(self) -> None:
        """Push what waits, and what comes from now on."""
        self._is_paused = False
        if self._is_decoding:
            self._resume_sequence()

    async def stop(self) -> decode_pb2.SequenceStats | None:
        """End the sequence because its text is over; its statistics if they come soon."""
        self._is_over = True
        if self._sequence is None:
            return None
        self._last_stats = asyncio.get_running_loop().create_future()
        self._sequence.abort()
        self._sequence.resume()
        try:
            async with asyncio.timeout(_LAST_DELTA_S):
                return await self._last_stats
        except (TimeoutError, errors.SlipstreamError):
            return None

    def release(self) -> Coroutine[None, None, None] | None:
        """The work left until the workers hold nothing of the attempt; None when they hold nothing. The work
        ends when they hold nothing or cannot be asked, and never raises."""
        self._is_over = True
        self._end_prefill()
        if self._decode_tokens is not None:
            self._decode_tokens.release()
        for link in (self.workers.prefill, self.workers.decode):
            if link is not None:
                link.listeners.discard(self)
        sequence, self._sequence = self._sequence, None
        waits: list[Awaitable[None]] = []
        if sequence is not None:
            sequence.forget()
            if not sequence.finished:
                timeout_s = _release_timeout_s(self.workers.decode)
                waits.append(self.workers.decode_stream.abort_and_wait(self._name(), timeout_s=timeout_s))
        # A sequence that came to its end after it ran has released the handoff.
        handed_over = sequence is not None and sequence.finished and sequence.running
        if self._prefill_began and not handed_over:
            waits.append(self._abort_prefill())
        self._prefill_began = False
        return self._release(waits) if waits else None

    async def _release(self, waits: Sequence[Awaitable[None]]) -> None:
        links = [link for link in (self.workers.prefill, self.workers.decode) if link is not None]
        for link in links:
            link.releases_in_flight += 1
        try:
            await asyncio.gather(*waits, return_exceptions=True)
        finally:
            for link in links:
                link.releases_in_flight -= 1

    def _fail(self, failure: WorkerFailed) -> None:
        if not self._is_over:
            self._is_over = True
            self.listener.on_attempt_failed(self, failure)

    # ---- the connections' heartbeats

    def on_worker_silent(self, link: WorkerConnection) -> None:
        """See `WorkerListener`. Until the sequence runs, decode still pulls from the prefill worker."""
        has_pulled = self._sequence is not None and self._sequence.running
        is_needed = not has_pulled if link is self.workers.prefill else self._is_decoding
        if is_needed:
            self._fail(WorkerFailed(errors.Unavailable(f"{link.worker.instance} is silent"), link.key))

    def on_worker_draining(self, link: WorkerConnection) -> None:
        """See `WorkerListener`. A sequence whose client does not read stays where it is."""
        if link is self.workers.decode and self._is_decoding and not (self._is_paused or self._is_over):
            self._leave_if_draining()

    def on_listener_error(self, error: Exception) -> None:
        """See `SequenceListener` and `PrefillListener`."""
        self._is_over = True
        self.listener.on_listener_error(error)

    # ---- prefill

    def _start_prefill(self, link: WorkerConnection) -> None:
        context = self.spec.prompt.followed_by(self.emitted)
        self._prefill_tokens = TokensInFlight(link, self.workers.uncached_tokens or len(context))
        self._prefill_began, self._prefill_was_ready = True, link.ready
        link.listeners.add(self)
        start = prefill_pb2.StartPrefill()
        self._write_common(start)
        if self.workers.peer_endpoint:
            start.peer_endpoint = self.workers.peer_endpoint
        if self.emitted:
            start.emitted_tokens = len(self.emitted)
        with tracing.under(self.span):
            self._prefill = link.start_prefill(start, context, self)

    def on_prefill_event(self, event: prefill_pb2.PrefillEvent) -> None:
        """See `PrefillListener`."""
        kind = event.WhichOneof("kind")
        if self._is_over:
            return
        if kind == "first_token":
            self._on_first_token(event.first_token)
        elif kind == "opened":
            self._ticket = event.opened.ticket
            # With one token in all decode need not pull the KV.
            is_last = self.spec.sampling.max_tokens - len(self.emitted) <= 1
            if not (self.defers_decode or is_last):
                self._start_decode(self._ticket)
        elif kind == "progress" and self._prefill_tokens is not None:
            context_tokens = len(self.spec.prompt) + len(self.emitted)
            self._prefill_tokens.lower_to(context_tokens - event.progress.computed_tokens)

    def on_prefill_failed(self, error: errors.SlipstreamError, *, is_connection_lost: bool) -> None:
        """See `PrefillListener`."""
        link = self.workers.prefill
        assert link is not None
        died = isinstance(error, errors.Internal)
        if is_connection_lost:
            died = self._prefill_was_ready and not link.is_silent and not link.draining
        self._fail(WorkerFailed(error, link.key, died=died))

    def _on_first_token(self, first: prefill_pb2.FirstToken) -> None:
        prefill = self.workers.prefill
        assert prefill is not None
        self._end_prefill()
        if not self._ticket:  # decode would have to make this token again
            self._fail(WorkerFailed(errors.Internal("a first token without a handoff"), prefill.key))
            return
        self._is_over = first.finish_reason != FINISH_NONE
        self.listener.on_batch(self, _first_batch(first))
        if self._is_over:
            return
        if self._sequence is None:
            self._start_decode(self._ticket)
        self._is_decoding = True
        self._resume_sequence()

    def _end_prefill(self) -> None:
        """Nothing is computed there any more; decode may still pull from it."""
        if self._prefill is not None:
            self._prefill.close()
            self._prefill = None
        if self._prefill_tokens is not None:
            self._prefill_tokens.release()

    async def _abort_prefill(self) -> None:
        assert self.workers.prefill is not None
        stub: prefill_pb2_grpc.PrefillServiceAsyncStub = prefill_pb2_grpc.PrefillServiceStub(
            self.workers.prefill.channel
        )
        await stub.AbortPrefill(
            prefill_pb2.AbortPrefillRequest(attempt=self._name()),
            timeout=_release_timeout_s(self.workers.prefill),
            metadata=tracing.trace_metadata(),
        )

    # ---- decode

    def _start_decode(self, ticket: bytes) -> None:
        request = decode_pb2.StartSequence(ticket=ticket, store_generated=self.spec.store_generated)
        self._write_common(request)
        if self.emitted:
            request.emitted = as_tokens(self.emitted).tobytes()
        if tracing.enabled():
            with tracing.under(self.span):
                request.trace.update(tracing.trace_metadata())
        self._decode_was_ready = self.workers.decode.ready
        self._sequence = self.workers.decode_stream.start(request, self.spec.prompt, self)

    def _resume_sequence(self) -> None:
        if self._sequence is not None and not self._is_paused:
            self._sequence.resume()

    def on_tokens(self, tokens: list[int], rest: decode_pb2.SequenceDelta | None) -> None:
        """See `SequenceListener`."""
        if self._is_over:
            waiter = self._last_stats
            if waiter is not None and not waiter.done() and rest is not None and rest.finish_reason:
                waiter.set_result(rest.stats)
            return
        if self._decode_tokens is not None:
            self._decode_tokens.add(len(tokens))
        if self.workers.prefill is not None:
            self.workers.prefill.listeners.discard(self)  # decode has pulled all
        if rest is None:
            self.listener.on_batch(self, TokenBatch(tokens))
        elif (error := _failure(rest)) is not None:
            if tokens:
                self.listener.on_batch(self, TokenBatch(tokens, logprobs=rest.logprobs))
            self._on_decode_failure(error)
        else:
            self._on_rest(tokens, rest)
        if self.workers.decode.draining and not self._is_over:
            self._leave_if_draining()

    def _on_rest(self, tokens: list[int], rest: decode_pb2.SequenceDelta) -> None:
        finish = rest.finish_reason
        self._is_over = bool(finish)
        stats = rest.stats if finish else None
        self.listener.on_batch(self, TokenBatch(tokens, logprobs=rest.logprobs, finish=finish, stats=stats))

    def _on_decode_failure(self, error: errors.SlipstreamError) -> None:
        """The worker reported why the sequence ended. One that never ran may have failed at its pull."""
        never_ran = self._sequence is not None and not self._sequence.running
        prefill = self.workers.prefill
        pulled_from = prefill.key if never_ran and prefill is not None else ""
        died = isinstance(error, errors.Internal)
        self._fail(WorkerFailed(error, self.workers.decode.key, died=died, other=pulled_from))

    def on_sequence_failed(self, error: errors.SlipstreamError) -> None:
        """See `SequenceListener`."""
        if self._last_stats is not None and not self._last_stats.done():
            self._last_stats.set_exception(error)
        link = self.workers.decode
        is_lost = isinstance(error, errors.Unavailable) and not link.is_silent
        died = is_lost and self._decode_was_ready and not link.draining
        self._fail(WorkerFailed(error, link.key, died=died))

    def _leave_if_draining(self) -> None:
        link = self.workers.decode
        if self.listener.may_leave(link):
            error = errors.Draining(f"{link.worker.instance} is draining")
            self._fail(WorkerFailed(error, link.key, moved=True))

    # ---- common

    def _write_common(self, request: prefill_pb2.StartPrefill | decode_pb2.StartSequence) -> None:
        """The fields of both requests, each set in place: protobuf serializes and parses again a message that
        is passed to the constructor of another one."""
        spec, name = self.spec, request.attempt
        name.request_id, name.attempt, name.epoch = spec.request_id, self.number, spec.epoch
        request.fingerprint.CopyFrom(spec.fingerprint)
        request.sampling.CopyFrom(spec.sampling)
        if spec.deadline_s is not None:
            request.deadline_ms = max(1, int((spec.deadline_s - self.clock()) * 1e3))
        request.kvstore_endpoint = self.workers.kvstore_endpoint
        request.salt = spec.prompt.salt

    def _name(self) -> common_pb2.Attempt:
        return common_pb2.Attempt(request_id=self.spec.request_id, attempt=self.number, epoch=self.spec.epoch)


def _failure(delta: decode_pb2.SequenceDelta) -> errors.SlipstreamError | None:
    """Why a sequence ended without having come to its end."""
    if delta.HasField("failure"):
        return from_failure(delta.failure)
    if delta.finish_reason == common_pb2.FINISH_REASON_ABORTED:
        return errors.Unavailable("decode ended the sequence")
    return None


def _release_timeout_s(link: WorkerConnection) -> float:
    return RELEASE_TIMEOUT_S if link.reachable else _RELEASE_GONE_S


def _first_batch(first: prefill_pb2.FirstToken) -> TokenBatch:
    return TokenBatch(
        [first.token_id],
        logprobs=[first.logprobs] if first.HasField("logprobs") else [],
        cached=first.cached,
        prefill_ms=first.queue_ms + first.compute_ms,
        finish=first.finish_reason,
    )

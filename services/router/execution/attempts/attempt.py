"""One try at a request on one pair of workers: prefill, handoff to decode, tokens, release.

The router sends the ticket to decode as soon as prefill has opened the handoff, so decode pulls blocks while
prefill computes. The stream readers and the token batcher call the attempt, which pushes token batches to
its listener (hedging.py). `release` frees the attempt on both workers, whatever its end, so that no lease has
to expire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from opentelemetry.trace import INVALID_SPAN, Span

from libs.common.rpc.multiplexed_client import PeerUnanswering
from libs.common.telemetry import tracing
from services.router.execution.attempt_types import (
    FINISH_NONE,
    AttemptSpec,
    TokenBatch,
    WorkerFailed,
    WorkerPair,
    attempt_name,
    delta_batch,
    failure_of,
    first_batch,
    note_prompt_start,
    note_restored,
    start_prefill,
    start_sequence,
)
from services.router.recording.timeline import RequestTimeline
from services.router.workers.connection import TokensInFlight, WorkerConnection
from services.router.workers.decode_client import DecodeClient
from services.router.workers.prefill_client import PrefillClient, RemotePrefill
from services.router.workers.remote_sequence import RemoteSequence
from slipstream import errors
from slipstream.v1 import common_pb2, decode_pb2, prefill_pb2

RELEASE_TIMEOUT_S = 10.0
# The time-out for a lost or silent worker, which may still receive the call; otherwise its leases expire.
_RELEASE_UNREACHABLE_TIMEOUT_S = 1.0
# The time-out for the statistics of a stopped sequence.
_LAST_DELTA_TIMEOUT_S = 1.0


class AttemptListener(Protocol):
    """Receives an attempt's tokens and its end. All calls are synchronous, on the event loop."""

    def on_batch(self, attempt: WorkerAttempt, batch: TokenBatch) -> None:
        """Take the next tokens. A batch with a finish reason is the last call for the attempt."""

    def on_prompt_logprobs(self, attempt: WorkerAttempt, pieces: Sequence[common_pb2.PromptLogprobs]) -> None:
        """Take the next rows of the prompt, which come before all tokens."""

    def on_attempt_failed(self, attempt: WorkerAttempt, failure: WorkerFailed) -> None:
        """Handle the attempt's failure, the last call for the attempt."""

    def on_listener_error(self, error: Exception) -> None:
        """Handle an error that a call of this listener raised."""

    def may_leave(self, link: WorkerConnection) -> bool:
        """Whether the sequence moves away now from a draining decode worker."""


@dataclass(slots=True, eq=False)
class WorkerAttempt:
    """One try on a pair of workers, counted from 1. Its owner calls `begin` once, and at the end `release`.

    With `defers_decode` the decode sequence starts only after the first token.
    """

    number: int
    spec: AttemptSpec
    workers: WorkerPair
    emitted: Sequence[int]
    listener: AttemptListener
    clock: Callable[[], float]
    defers_decode: bool = False
    timeline: RequestTimeline = field(default_factory=RequestTimeline)
    span: Span = INVALID_SPAN  # the attempt's owner ends it
    _prefill: RemotePrefill | None = None
    _prefill_began: bool = False
    _prefill_tokens: TokensInFlight | None = None
    _sequence: RemoteSequence | None = None
    _decode_tokens: TokensInFlight | None = None
    _ticket: bytes = b""
    _is_decoding: bool = False  # prefill has delivered the first token, or the attempt has no prefill worker
    _has_decoded: bool = False  # the decode worker has sent something
    _cached: Sequence[common_pb2.CachedTokens] | None = None  # of a prompt that the decode worker computes
    _is_paused: bool = False
    _is_over: bool = False
    _last_stats: asyncio.Future[decode_pb2.SequenceStats] | None = None  # while `stop` waits
    # Whether each worker was ready when the attempt began on it. Later readiness is no evidence: a connection
    # may notice a crash before the worker's last tokens arrive here.
    _prefill_was_ready: bool = False
    _decode_was_ready: bool = False

    def begin(self) -> None:
        """Start on the first worker. The listener gets its first call in a later loop iteration."""
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
        """Whether the listener gets no more calls."""
        return self._is_over

    def pause(self) -> None:
        """Push no tokens until `resume`. The sequence joins and bounds the tokens that wait."""
        self._is_paused = True
        if self._sequence is not None:
            self._sequence.pause()

    def resume(self) -> None:
        """Push the waiting tokens, and later ones as they arrive."""
        self._is_paused = False
        if self._is_decoding:
            self._resume_sequence()

    async def stop(self) -> decode_pb2.SequenceStats | None:
        """End the sequence after a stop string. Returns its statistics, or None after a time-out."""
        self._is_over = True
        if self._sequence is None:
            return None
        self._last_stats = asyncio.get_running_loop().create_future()
        self._sequence.abort()
        self._sequence.resume()
        try:
            async with asyncio.timeout(_LAST_DELTA_TIMEOUT_S):
                return await self._last_stats
        except (TimeoutError, errors.SlipstreamError):
            return None

    def release(self) -> Coroutine[None, None, None] | None:
        """End the attempt. Returns the coroutine that frees it on its workers; None if they hold nothing.

        The coroutine ends when the workers hold nothing or cannot be reached. It never raises.
        """
        self._is_over = True
        self._end_prefill()
        if self._decode_tokens is not None:
            self._decode_tokens.release()
        for link in (self.workers.prefill, self.workers.decode):
            if link is not None:
                link.listeners.discard(self)
        sequence, self._sequence = self._sequence, None
        prefill = self.workers.prefill
        holders: list[tuple[WorkerConnection, PrefillClient | DecodeClient]] = []
        if sequence is not None:
            if not sequence.finished:
                sequence.abort()  # has no time-out, which AbortDecode may reach while this router stalls
                holders.append((self.workers.decode, self.workers.decode_stream))
            sequence.close()
        # A decode worker whose sequence ran to its end has released the handoff.
        handed_over = sequence is not None and sequence.finished and sequence.running
        if prefill is not None and self._prefill_began and not handed_over:
            holders.append((prefill, prefill.prefills))
        self._prefill_began = False
        return self._release(holders) if holders else None

    async def _release(
        self, holders: Sequence[tuple[WorkerConnection, PrefillClient | DecodeClient]]
    ) -> None:
        name = attempt_name(self.spec, self.number)
        waits = [client.abort_and_wait(name, timeout_s=_release_timeout_s(link)) for link, client in holders]
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

    # ---- calls of the workers' connections

    def on_worker_silent(self, link: WorkerConnection) -> None:
        """See `WorkerListener`. Decode pulls from the prefill worker until the sequence runs."""
        has_pulled = self._sequence is not None and self._sequence.running
        is_needed = not has_pulled if link is self.workers.prefill else self._is_decoding
        if is_needed:
            error = errors.Unavailable(f"{link.worker.instance} is silent")
            self._fail(WorkerFailed(error, link.key, silent=link))

    def on_worker_draining(self, link: WorkerConnection) -> None:
        """See `WorkerListener`. A paused sequence stays on its worker."""
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
        start = start_prefill(
            self.spec, self.workers, attempt=self.number, n_emitted=len(self.emitted), now_s=self.clock()
        )
        with tracing.under(self.span):
            self._prefill = link.prefills.start(start, context, self)

    def on_prefill_event(self, event: prefill_pb2.PrefillEvent) -> None:
        """See `PrefillListener`."""
        kind = event.WhichOneof("kind")
        if self._is_over:
            return
        if kind == "first_token":
            self._on_first_token(event.first_token)
        elif kind == "opened":
            self._ticket = event.opened.ticket
            self._note_opened(event.opened)
            # Prefill makes the only token of a one-token answer, so decode need not pull the KV.
            is_last = self.spec.sampling.max_tokens - len(self.emitted) <= 1
            if not (self.defers_decode or is_last):
                self._start_decode(self._ticket)
        elif kind == "progress" and self._prefill_tokens is not None:
            context_tokens = len(self.spec.prompt) + len(self.emitted)
            self._prefill_tokens.lower_to(context_tokens - event.progress.computed_tokens)
        elif kind == "prompt_logprobs":
            self.listener.on_prompt_logprobs(self, [event.prompt_logprobs])

    def on_prefill_failed(self, error: errors.SlipstreamError, *, is_connection_lost: bool) -> None:
        """See `PrefillListener`."""
        link = self.workers.prefill
        assert link is not None
        is_crash = isinstance(error, errors.Internal)
        silent: WorkerConnection | None = None
        if is_connection_lost:
            is_crash = self._prefill_was_ready and _is_crash(error, link)
            silent = None if is_crash or link.draining else link
        self._fail(WorkerFailed(error, link.key, is_crash=is_crash, silent=silent))

    def _on_first_token(self, first: prefill_pb2.FirstToken) -> None:
        prefill = self.workers.prefill
        assert prefill is not None
        self._end_prefill()
        if not self._ticket:  # without the KV, decode would compute this token again
            error = errors.Internal("the prefill worker sent a first token without a handoff")
            self._fail(WorkerFailed(error, prefill.key))
            return
        self._is_over = first.finish_reason != FINISH_NONE
        self._note_first_token(first, prefill.worker.instance)
        self.listener.on_batch(self, first_batch(first))
        if self._is_over:
            return
        if self._sequence is None:
            self._start_decode(self._ticket)
        self._is_decoding = True
        self._resume_sequence()

    def _end_prefill(self) -> None:
        """Close the prefill stream's entry. Decode may still pull the handoff."""
        if self._prefill is not None:
            self._prefill.close()
            self._prefill = None
        if self._prefill_tokens is not None:
            self._prefill_tokens.release()

    # ---- the request's timeline

    def _note_opened(self, opened: prefill_pb2.HandoffOpened) -> None:
        assert self.workers.prefill is not None
        tokens = sum([item.tokens for item in opened.cached])
        worker = self.workers.prefill.worker.instance
        self.timeline.note("prefill_started", attempt=self.number, worker=worker, tokens=tokens)

    def _note_first_token(self, first: prefill_pb2.FirstToken, worker: str) -> None:
        note_restored(self.timeline, first.cached, attempt=self.number, worker=worker)
        spent = f"{first.queue_ms:.1f} ms for pages, {first.compute_ms:.1f} ms of work"
        self.timeline.note("first_token", attempt=self.number, worker=worker, text=spent)

    # ---- decode

    def _start_decode(self, ticket: bytes) -> None:
        request = start_sequence(
            self.spec,
            self.workers,
            attempt=self.number,
            ticket=ticket,
            emitted=self.emitted,
            now_s=self.clock(),
        )
        if tracing.enabled():
            with tracing.under(self.span):
                request.trace.update(tracing.trace_metadata())
        self._decode_was_ready = self.workers.decode.ready
        if ticket:
            decode = self.workers.decode.worker.instance
            self.timeline.note("handoff", attempt=self.number, worker=decode)
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
        if rest is not None and rest.prompt_logprobs:
            self.listener.on_prompt_logprobs(self, rest.prompt_logprobs)
            if not (tokens or rest.finish_reason or rest.HasField("failure")):
                return
        cached = None
        if not self._has_decoded:
            self._has_decoded, cached = True, self._cached
            is_first = self.timeline.first_token_s is None
            decode = self.workers.decode.worker.instance
            self.timeline.note("first_token" if is_first else "tokens", attempt=self.number, worker=decode)
        if self._decode_tokens is not None:
            self._decode_tokens.add(len(tokens))
        if self.workers.prefill is not None:
            self.workers.prefill.listeners.discard(self)  # decode has pulled the whole handoff
        if rest is None:
            self.listener.on_batch(self, TokenBatch(tokens, cached=cached))
        elif (error := failure_of(rest)) is not None:
            if tokens:
                self.listener.on_batch(self, TokenBatch(tokens, rest.logprobs, is_closing=rest.is_closing))
            self._on_decode_failure(error)
        else:
            self._is_over = bool(rest.finish_reason)
            self.listener.on_batch(self, delta_batch(tokens, rest, cached))
        if self.workers.decode.draining and not self._is_over:
            self._leave_if_draining()

    def on_prompt_started(self, start: decode_pb2.PromptStart) -> None:
        """See `SequenceListener`."""
        self._cached, worker = start.cached, self.workers.decode.worker.instance
        note_prompt_start(self.timeline, start, at_s=self.clock(), attempt=self.number, worker=worker)

    def _on_decode_failure(self, error: errors.SlipstreamError) -> None:
        """Fail with the worker's error. A sequence that never ran may have failed while it pulled."""
        never_ran = self._sequence is not None and not self._sequence.running
        prefill = self.workers.prefill
        pulled_from = prefill.key if never_ran and prefill is not None else ""
        is_crash = isinstance(error, errors.Internal)
        self._fail(WorkerFailed(error, self.workers.decode.key, is_crash=is_crash, other_worker=pulled_from))

    def on_sequence_failed(self, error: errors.SlipstreamError) -> None:
        """See `SequenceListener`."""
        if self._last_stats is not None and not self._last_stats.done():
            self._last_stats.set_exception(error)
        link = self.workers.decode
        is_lost = isinstance(error, errors.Unavailable)
        is_crash = is_lost and self._decode_was_ready and _is_crash(error, link)
        silent = link if is_lost and not (is_crash or link.draining) else None
        self._fail(WorkerFailed(error, link.key, is_crash=is_crash, silent=silent))

    def _leave_if_draining(self) -> None:
        link = self.workers.decode
        if self.listener.may_leave(link):
            error = errors.Draining(f"{link.worker.instance} is draining")
            self._fail(WorkerFailed(error, link.key, is_drain=True))


def _is_crash(error: errors.SlipstreamError, link: WorkerConnection) -> bool:
    """Whether a lost connection shows that a ready worker has ended. One that stands still keeps its own.

    In a busy router gRPC gives up a worker that stands still before `is_silent` does, whose clock lags.
    """
    return not (link.is_silent or link.draining or isinstance(error, PeerUnanswering))


def _release_timeout_s(link: WorkerConnection) -> float:
    return RELEASE_TIMEOUT_S if link.reachable else _RELEASE_UNREACHABLE_TIMEOUT_S

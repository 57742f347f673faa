"""One try at a request on one pair of workers: prefill, handoff to decode, tokens, release.

The ticket goes to decode as soon as prefill has opened the handoff, so decode pulls blocks while
prefill computes. Whatever ends the attempt, `release` tells both workers; nothing there waits for a
lease to run out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial

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
from services.router.workers.decode_sequence import Arrival, RemoteSequence
from services.router.workers.prefill_stream import RemotePrefill
from slipstream import errors
from slipstream.rpc_errors import from_failure
from slipstream.v1 import common_pb2, decode_pb2, prefill_pb2, prefill_pb2_grpc

# A worker whose load stream, which is its heartbeat (cluster/worker_service.py), was silent for this
# long is given up, and with it everything it runs for this router.
SILENCE_S = 2.0
RELEASE_TIMEOUT_S = 10.0
# One that is gone or silent is asked all the same, in case that it hears us; its leases do the rest.
_RELEASE_GONE_S = 1.0
# How long the statistics of a sequence that we stopped are waited for.
_LAST_DELTA_S = 1.0


@dataclass(slots=True)
class Attempt:
    """One try, counted from 1. Iterate over `batches`, then `release`, always.

    `leave` is asked after each frame whether the sequence should move away from its decode worker now.
    With `defer_decode` the decode worker hears of the sequence only when the first token was taken.
    """

    number: int
    job: AttemptSpec
    place: WorkerPair
    emitted: Sequence[int]
    clock: Callable[[], float]
    silence_s: float = SILENCE_S
    leave: Callable[[WorkerConnection], bool] = lambda _link: False
    defer_decode: bool = False
    on_begun: Callable[[], None] = lambda: None  # in the first step of `batches`: the first worker was told
    span: Span = INVALID_SPAN  # its caller's to end
    # May be set between two batches: given the tokens that come alone while the next batch is waited for,
    # which then is not made of them. False: it leaves them.
    take_tokens: Callable[[Sequence[int]], bool] | None = None
    # The same for a request's very first token, which then comes in a batch that says that it is shown.
    take_first: Callable[[Sequence[int]], bool] | None = None
    _sequence: RemoteSequence | None = None
    _ticket: bytes = b""
    _prefill_began: bool = False
    # Whether the workers were in use as they were asked. Later on the link may have heard of a death before
    # the tokens from just before it are taken here.
    _prefill_was_ready: bool = False
    _decode_was_ready: bool = False
    _counts: list[TokensInFlight] = field(default_factory=list)

    async def batches(self) -> AsyncGenerator[TokenBatch, None]:
        """The tokens in order. Raises WorkerFailed; DeadlineExceeded and InvalidArgument as they come."""
        decode_count = TokensInFlight(self.place.decode, len(self.job.prompt) + len(self.emitted))
        self._counts.append(decode_count)
        if self.place.prefill is not None:
            first = await self._prefill(self.place.prefill)
            yield first
            if first.finish != FINISH_NONE:
                return
        if self._sequence is None:
            self._start_decode(self._ticket)
            if self.place.prefill is None:
                self.on_begun()
        sequence = self._sequence
        assert sequence is not None
        sequence.on_tokens = partial(self._pass_on, decode_count)
        while True:
            arrival = await self._next_arrival(sequence)
            tokens, rest = arrival.tokens, arrival.rest
            decode_count.add(len(tokens))
            if rest is None:
                yield TokenBatch(tokens)
                self._check_leave()
                continue
            error = _failure(rest)
            if error is not None:
                if tokens:
                    yield TokenBatch(tokens, logprobs=rest.logprobs)
                pulled_from = "" if sequence.running or self.place.prefill is None else self.place.prefill.key
                died = isinstance(error, errors.Internal)
                raise WorkerFailed(error, self.place.decode.key, died=died, other=pulled_from)
            yield TokenBatch(
                tokens,
                logprobs=rest.logprobs,
                finish=rest.finish_reason,
                stats=rest.stats if arrival.ended else None,
            )
            if arrival.ended:
                return
            self._check_leave()

    def _pass_on(self, count: TokensInFlight, tokens: Sequence[int]) -> bool:
        """Whether tokens were taken outside of a batch. None are once the sequence is to move away."""
        if self.take_tokens is None or self.place.decode.draining or not self.take_tokens(tokens):
            return False
        count.add(len(tokens))
        return True

    async def stop(self) -> decode_pb2.SequenceStats | None:
        """End the sequence because its text is over; its statistics if they come soon."""
        if self._sequence is None:
            return None
        try:
            async with asyncio.timeout(_LAST_DELTA_S):
                self._sequence.abort()
                while True:
                    arrival = await self._sequence.next()
                    if arrival.rest is not None and arrival.ended:
                        return arrival.rest.stats
        except (TimeoutError, errors.SlipstreamError):
            return None

    def release(self) -> Coroutine[None, None, None] | None:
        """What is left to be run for the workers to hold nothing of the attempt: it returns when they do, or
        cannot be asked, and never raises. None when they hold nothing any more."""
        for count in self._counts:
            count.release()
        sequence, self._sequence = self._sequence, None
        waits: list[Awaitable[None]] = []
        if sequence is not None:
            sequence.forget()
            if not sequence.finished:
                timeout_s = _release_timeout_s(self.place.decode)
                waits.append(self.place.decode_stream.abort_and_wait(self._attempt(), timeout_s=timeout_s))
        # A sequence that came to its end after it ran has released the handoff.
        handed_over = sequence is not None and sequence.finished and sequence.running
        if self._prefill_began and not handed_over:
            waits.append(self._abort_prefill())
        return self._release(waits) if waits else None

    async def _release(self, waits: Sequence[Awaitable[None]]) -> None:
        links = [link for link in (self.place.prefill, self.place.decode) if link is not None]
        for link in links:
            link.releases_in_flight += 1
        try:
            await asyncio.gather(*waits, return_exceptions=True)
        finally:
            for link in links:
                link.releases_in_flight -= 1

    # ---- prefill

    async def _prefill(self, link: WorkerConnection) -> TokenBatch:
        """The first token, and the decode sequence started on the way."""
        context = self.job.prompt.followed_by(self.emitted)
        context_tokens = len(context)
        count = TokensInFlight(link, self.place.uncached_tokens or context_tokens)
        self._counts.append(count)
        self._prefill_began, self._prefill_was_ready = True, link.ready
        left_s = self._left_s()
        start = self._prefill_start(left_s)
        with tracing.under(self.span):
            call = link.start_prefill(start, context, timeout_s=left_s)
        try:
            self.on_begun()
            call.on_first = self._pass_first
            while True:
                event = await self._next_event(link, call)
                kind = event.WhichOneof("event")
                if kind == "first_token":
                    if not self._ticket:  # decode would have to make this token again
                        raise WorkerFailed(errors.Internal("a first token without a handoff"), link.key)
                    return _first_batch(event.first_token, shown=call.first_taken)
                if kind == "opened":
                    self._ticket = event.opened.ticket
                    # One token is all: nobody needs to pull the KV.
                    one = self.job.sampling.max_tokens - len(self.emitted) <= 1
                    if not (self.defer_decode or one):
                        self._start_decode(self._ticket)
                elif kind == "progress":
                    count.lower_to(context_tokens - event.progress.computed_tokens)
        finally:
            count.release()
            call.close()

    def _pass_first(self, first: prefill_pb2.FirstToken) -> bool:
        """Whether a first token was taken outside of a batch. What ends the answer or has log probabilities
        is not, nor what goes on with an answer: its client may have to be waited for."""
        if self.take_first is None or self.emitted or first.finish_reason or first.HasField("logprobs"):
            return False
        return self.take_first([first.token_id])

    def _prefill_start(self, left_s: float | None) -> prefill_pb2.PrefillStart:
        start = prefill_pb2.PrefillStart()
        request = start.request
        self._write_common(request, left_s)
        if self.place.peer_endpoint:
            request.peer_endpoint = self.place.peer_endpoint
        if self.emitted:
            request.emitted_tokens = len(self.emitted)
        return start

    async def _abort_prefill(self) -> None:
        assert self.place.prefill is not None
        stub: prefill_pb2_grpc.PrefillServiceAsyncStub = prefill_pb2_grpc.PrefillServiceStub(
            self.place.prefill.channel
        )
        await stub.AbortPrefill(
            prefill_pb2.AbortPrefillRequest(attempt=self._attempt()),
            timeout=_release_timeout_s(self.place.prefill),
            metadata=tracing.trace_metadata(),
        )

    # ---- decode

    def _start_decode(self, ticket: bytes) -> None:
        request = decode_pb2.StartSequence(ticket=ticket, store_generated=self.job.store_generated)
        self._write_common(request, self._left_s())
        if self.emitted:
            request.emitted = as_tokens(self.emitted).tobytes()
        if tracing.enabled():
            with tracing.under(self.span):
                request.trace.update(tracing.trace_metadata())
        self._decode_was_ready = self.place.decode.ready
        self._sequence = self.place.decode_stream.start(request, self.job.prompt)

    # ---- common

    def _write_common(
        self, request: prefill_pb2.PrefillRequest | decode_pb2.StartSequence, left_s: float | None
    ) -> None:
        """What both workers are told. Each field is set where it is: a message that is given to another one
        is written down and read again for it."""
        job, name = self.job, request.attempt
        name.request_id, name.attempt, name.epoch = job.request_id, self.number, job.epoch
        request.fingerprint.CopyFrom(job.fingerprint)
        request.sampling.CopyFrom(job.sampling)
        if left_s is not None:
            request.deadline_ms = max(1, int(left_s * 1e3))
        request.kvstore_endpoint = self.place.kvstore_endpoint
        request.salt = job.prompt.salt

    def _attempt(self) -> common_pb2.Attempt:
        return common_pb2.Attempt(request_id=self.job.request_id, attempt=self.number, epoch=self.job.epoch)

    def _left_s(self) -> float | None:
        return None if self.job.deadline_s is None else max(0.001, self.job.deadline_s - self.clock())

    async def _next_arrival(self, sequence: RemoteSequence) -> Arrival:
        link, prefill = self.place.decode, self.place.prefill
        while True:
            try:
                arrival = await sequence.next_or_idle()
            except errors.SlipstreamError as error:
                broke = isinstance(error, errors.Unavailable) and link.report_age_s <= self.silence_s
                died = broke and self._decode_was_ready and not link.draining
                raise WorkerFailed(error, link.key, died=died) from error
            if arrival is not None:
                return arrival
            self._check_silence(link)
            if prefill is not None and not sequence.running:
                self._check_silence(prefill)  # decode still pulls from it
            self._check_leave()

    def _check_silence(self, link: WorkerConnection) -> None:
        if link.report_age_s > self.silence_s:
            link.fell_silent()
            error = errors.Unavailable(f"{link.worker.instance} is silent")
            if link is self.place.decode:
                # All its sequences at once; when it wakes up it finds their stream gone, and ends them.
                self.place.decode_stream.break_off(error)
            raise WorkerFailed(error, link.key)

    def _check_leave(self) -> None:
        link = self.place.decode
        if self.leave(link):
            raise WorkerFailed(errors.Draining(f"{link.worker.instance} is draining"), link.key, moved=True)

    async def _next_event(self, link: WorkerConnection, call: RemotePrefill) -> prefill_pb2.PrefillResponse:
        """What prefill says next. WorkerFailed when it fails or falls silent meanwhile."""
        while True:
            try:
                response = await call.next_or_idle()
            except errors.SlipstreamError as error:
                died = isinstance(error, errors.Internal)
                if call.broke:
                    heard_of = link.report_age_s <= self.silence_s and not link.draining
                    died = self._prefill_was_ready and heard_of
                raise WorkerFailed(error, link.key, died=died) from error
            if response is not None:
                return response
            self._check_silence(link)


def _failure(delta: decode_pb2.SequenceDelta) -> errors.SlipstreamError | None:
    """Why a sequence ended without having come to its end."""
    if delta.HasField("failure"):
        return from_failure(delta.failure)
    if delta.finish_reason == common_pb2.FINISH_REASON_ABORTED:
        return errors.Unavailable("decode ended the sequence")
    return None


def _release_timeout_s(link: WorkerConnection) -> float:
    return RELEASE_TIMEOUT_S if link.reachable else _RELEASE_GONE_S


def _first_batch(first: prefill_pb2.FirstToken, *, shown: bool) -> TokenBatch:
    logprobs = [first.logprobs] if first.HasField("logprobs") else []
    return TokenBatch(
        [first.token_id],
        logprobs=logprobs,
        cached=first.cached,
        prefill_ms=first.queue_ms + first.compute_ms,
        finish=first.finish_reason,
        shown=shown,
    )

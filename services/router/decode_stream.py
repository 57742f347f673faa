"""The one Decode stream of this router and a decode worker, shared by all sequences that run there.

    sequence = stream.start(start_sequence)          # sends `start`
    delta = await sequence.next()                    # everything that came since, as one delta
    sequence.abort()                                 # ends it there; the last delta still comes

The stream opens with its first sequence and stays open. When it breaks, all its sequences fail as
Unavailable, and the next start opens a new one. Tokens that wait, for a slow client or for the next round
of a busy router (delivery.py), are joined into one delta.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import grpc
import numpy as np

from libs.common import errors
from libs.common.telemetry import trace_metadata
from services.router.delivery import Delivery
from services.router.news import NewsWait, Ticker
from services.router.shared_stream import SharedStream, batches
from slipstream.v1 import common_pb2, decode_pb2, decode_pb2_grpc

log = logging.getLogger(__name__)

_Key = tuple[str, int]
_Command = decode_pb2.StartSequence | decode_pb2.AbortSequence

# Tokens of a sequence that wait for a client that does not read: 64 KiB. Beyond it the request is aborted.
MAX_PARKED_TOKENS = 16_384
_JOIN_PIECES = 256


class DecodeSequence:
    """One sequence on a decode worker, from start to its last delta."""

    def __init__(self, stream: DecodeStream, attempt: common_pb2.Attempt, *, handle: int = 0) -> None:
        self.attempt = attempt
        self.handle = handle
        self.running = False  # its KV is committed there
        self.finished = False  # its last delta was received: the worker holds nothing of it
        self.news = NewsWait()
        self._stream = stream
        self._pending: decode_pb2.SequenceDelta | None = None  # all but the tokens
        self._tokens: list[bytes] = []
        self._parked_bytes = 0
        self._marked = False
        self._delivered = False
        self._error: errors.SlipstreamError | None = None

    async def next(self) -> decode_pb2.SequenceDelta:
        """What came since the last call, at least one delta. Raises Unavailable when the stream broke,
        Aborted when too much waited to be read."""
        while True:
            delta = await self.next_or_idle()
            if delta is not None:
                return delta

    async def next_or_idle(self) -> decode_pb2.SequenceDelta | None:
        """As `next`; None when nothing came for IDLE_S or a little more."""
        if not self._delivered:
            await self.news.wait()
            if not self._delivered:
                return None
        self._delivered = self._error is not None
        if self._pending is None and not self._tokens:
            assert self._error is not None
            raise self._error
        delta = self._pending or decode_pb2.SequenceDelta()
        delta.tokens = b"".join(self._tokens)
        self._pending, self._tokens, self._parked_bytes = None, [], 0
        return delta

    def abort(self) -> None:
        """Tell the worker to stop. Its last delta, with the statistics, still comes. Idempotent."""
        if not self.finished:
            self._stream.send_abort(self.attempt)

    def forget(self) -> None:
        """Nobody will read it any more."""
        self._stream.forget(self)

    def feed(self, delta: decode_pb2.SequenceDelta) -> None:
        """From the stream's reader."""
        self.running = self.running or delta.running
        self.finished = self.finished or delta.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
        if delta.tokens:
            self.feed_tokens(delta.tokens)
            delta.tokens = b""
        if self._pending is None:
            self._pending = delta
        else:
            self._pending.MergeFrom(delta)
        self._mark()

    def feed_tokens(self, packed: bytes) -> None:
        """From the stream's reader: tokens and nothing else, little-endian u32."""
        if self._error is not None:
            return
        self.running = True
        self._tokens.append(packed)
        self._parked_bytes += len(packed)
        if len(self._tokens) > _JOIN_PIECES:
            self._tokens = [b"".join(self._tokens)]
            if self._parked_bytes > 4 * MAX_PARKED_TOKENS:
                self.abort()
                self.fail(errors.Aborted(f"the client left {MAX_PARKED_TOKENS} tokens unread"))
        self._mark()

    def fail(self, error: errors.SlipstreamError) -> None:
        """Nothing more will come."""
        if not self.finished and self._error is None:
            self._error = error
            self._wake()

    def deliver(self) -> None:
        """From the delivery: its round has come."""
        self._marked = False
        if self._pending is not None or self._tokens:
            self._wake()

    def _mark(self) -> None:
        if not self._marked:
            self._marked = True
            self._stream.delivery.mark(self)

    def _wake(self) -> None:
        self._delivered = True
        self.news.wake()


class DecodeStream:
    """See the module's text. Lives as long as its channel. `batches`: the worker takes several commands in
    one message."""

    def __init__(self, channel: grpc.aio.Channel, *, instance: str, batches: bool = False) -> None:
        self._stub: decode_pb2_grpc.DecodeServiceAsyncStub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._instance = instance
        self._stream: SharedStream[_Command, decode_pb2.DecodeResponse] = SharedStream(
            instance,
            open_call=lambda: self._stub.Decode(metadata=trace_metadata()),
            pack=_pack_batches if batches else _pack_singly,
            take=self.take,
            fail=self._fail_all,
        )
        self._sequences: dict[_Key, DecodeSequence] = {}
        self._by_handle: dict[int, DecodeSequence] = {}
        self._last_handle = 0
        self._ticker = Ticker(lambda: [sequence.news for sequence in self._sequences.values()])
        self.delivery = Delivery()

    @property
    def open_sequences(self) -> int:
        """Sequences not yet forgotten."""
        return len(self._sequences)

    def start(self, request: decode_pb2.StartSequence) -> DecodeSequence:
        """Start a sequence. What prevents it is told by the sequence."""
        request.handle = self._new_handle()
        sequence = DecodeSequence(self, request.attempt, handle=request.handle)
        self._sequences[_key(request.attempt)] = sequence
        self._by_handle[request.handle] = sequence
        self._stream.send(request)
        self._ticker.run()
        return sequence

    def send_abort(self, attempt: common_pb2.Attempt) -> None:
        """Stop a sequence; without a stream there is nothing to stop."""
        if self._stream.is_open:
            self._stream.send(decode_pb2.AbortSequence(attempt=attempt))

    async def abort_and_wait(self, attempt: common_pb2.Attempt, *, timeout_s: float) -> None:
        """Returns when the worker holds nothing of the sequence, or cannot be asked."""
        try:
            await self._stub.AbortDecode(decode_pb2.AbortDecodeRequest(attempt=attempt), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            log.info("abort of %s at %s: %s", attempt.request_id, self._instance, error.details())

    def forget(self, sequence: DecodeSequence) -> None:
        """Drop whatever still comes of the sequence."""
        self._sequences.pop(_key(sequence.attempt), None)
        self._by_handle.pop(sequence.handle, None)

    def break_off(self, error: errors.SlipstreamError) -> None:
        """Nobody answers there: all sequences fail with `error` at once, and the stream is cancelled, so
        that the worker, should it hear of it later, ends them too. The next start opens a new stream."""
        self._stream.break_off()
        self._fail_all(error)

    async def close(self) -> None:
        """End the stream; the worker aborts what still runs on it."""
        self._ticker.close()
        await self._stream.close()

    def take(self, frame: decode_pb2.DecodeResponse) -> None:
        """Hand a frame's tokens to their sequences; those nobody knows any more are dropped."""
        if frame.packed_handles:
            tokens, known = frame.packed_tokens, self._by_handle
            for index, handle in enumerate(np.frombuffer(frame.packed_handles, "<u4").tolist()):
                sequence = known.get(handle)
                if sequence is not None:
                    sequence.feed_tokens(tokens[4 * index : 4 * index + 4])
        for delta in frame.deltas:
            sequence = self._sequences.get((delta.request_id, delta.attempt))
            if sequence is not None:
                sequence.feed(delta)

    def _fail_all(self, error: errors.SlipstreamError) -> None:
        for sequence in self._sequences.values():
            sequence.fail(error)

    def _new_handle(self) -> int:
        self._last_handle = self._last_handle % 0xFFFF_FFFF + 1
        while self._last_handle in self._by_handle:
            self._last_handle = self._last_handle % 0xFFFF_FFFF + 1
        return self._last_handle


def _pack_singly(commands: Sequence[_Command]) -> Iterator[decode_pb2.DecodeRequest]:
    for command in commands:
        if isinstance(command, decode_pb2.StartSequence):
            yield decode_pb2.DecodeRequest(start=command)
        else:
            yield decode_pb2.DecodeRequest(abort=command)


def _pack_batches(commands: Sequence[_Command]) -> Iterator[decode_pb2.DecodeRequest]:
    for batch in batches(commands, _size):
        starts = [command for command in batch if isinstance(command, decode_pb2.StartSequence)]
        aborts = [command for command in batch if isinstance(command, decode_pb2.AbortSequence)]
        yield decode_pb2.DecodeRequest(starts=starts, aborts=aborts)


def _size(command: _Command) -> int:
    return len(command.prompt) if isinstance(command, decode_pb2.StartSequence) else 0


def _key(attempt: common_pb2.Attempt) -> _Key:
    return attempt.request_id, attempt.attempt

"""A gRPC server of HTTP/2 frames (RFC 9113) for fake workers: what is sent in one turn goes in one write.

No library: gRPC's own Python server takes tens of microseconds a message and a thread beside the event
loop, and on a small machine the router would pay for them. Prior knowledge only, no TLS, no compression.
What may be sent is what the client's windows allow, the rest waits; ours are as wide as can be.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.fakes.hpack import Header, HeaderReader, literal
from bench.fakes.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW,
    WINDOW_UPDATE,
    FrameReader,
    MessageReader,
    frame,
    prefixed,
    unpadded,
    wide_windows,
)

OK, UNIMPLEMENTED = 0, 12  # of gRPC
_NO_ERROR, _REFUSED_STREAM = 0, 7  # of HTTP/2
_REFILL_BYTES = 1 << 30  # received on a connection, or a stream, before its window is opened again
_OPENING = b"\x88" + literal(b"content-type", b"application/grpc")  # :status 200


@dataclass(eq=False, slots=True)
class Call:
    """One call, and what the client still takes of its answer."""

    connection: GrpcServerConnection
    stream_id: int
    headers: Sequence[Header]
    window: int
    received: MessageReader = field(default_factory=MessageReader)
    taken_bytes: int = 0
    to_send: deque[memoryview] = field(default_factory=deque)  # what waits for windows
    end: bytes | None = None  # trailers that wait behind it
    room: asyncio.Future[None] | None = None
    opened: bool = False
    half_closed: bool = False  # the client has sent all
    over: bool = False

    @property
    def method(self) -> str:
        """As "/package.Service/Method"."""
        return dict(self.headers).get(b":path", b"").decode()

    def send(self, message: bytes) -> None:
        """Queue a message until `flush`. No more of it than the client's windows allow is written then; the
        rest is when they do."""
        self.connection.send(self, message)

    @property
    def blocked(self) -> bool:
        """Whether the client has not taken what was sent: a caller that sends all the same fills memory."""
        return bool(self.to_send)

    async def wait_for_room(self) -> None:
        """Until it has. Returns at the end of the call, too."""
        while self.to_send and not self.over:
            self.room = asyncio.get_running_loop().create_future()
            await self.room

    def finish(self, status: int = OK, trailers: Sequence[Header] = ()) -> None:
        """Queue the end, behind what was sent; no message may follow it."""
        self.connection.finish(self, status, trailers)

    def flush(self) -> None:
        """Write what is queued on the call's connection."""
        self.connection.flush()


class Service(Protocol):
    """What answers. Calls are told apart by themselves; what it queues meanwhile is flushed for it."""

    def opened(self, call: Call) -> None:
        """A call's headers are there."""

    def asked(self, call: Call, message: bytes) -> None:
        """A message is there. The answer may come at any later time."""

    def half_closed(self, call: Call) -> None:
        """The client sends no more messages."""

    def left(self, call: Call) -> None:
        """The client wants no more of it, or is gone."""


@dataclass(eq=False, slots=True)
class _Block:
    stream_id: int
    flags: int
    parts: list[bytes] = field(default_factory=list)


class GrpcServerConnection(asyncio.Protocol):
    """One connection of one client."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._headers = HeaderReader()
        self._calls: dict[int, Call] = {}
        self._last_stream_id = 0
        self._leaving = False
        self._window = self._stream_window = WINDOW
        self._greeting, self._greeted = b"", False
        self._frames = FrameReader()
        self._taken_bytes = 0
        self._block: _Block | None = None
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        bound = transport.get_extra_info("socket")
        if bound is not None:  # asyncio does it only where it made the listening socket
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.write(wide_windows())

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for call in list(self._calls.values()):
            self._drop(call)

    def data_received(self, data: bytes) -> None:
        if not self._greeted:
            self._greeting += data
            if len(self._greeting) < len(PREFACE):
                return
            if not self._greeting.startswith(PREFACE):
                self.close()
                return
            self._greeted, data = True, self._greeting[len(PREFACE) :]
        for kind, flags, stream_id, payload in self._frames.whole(data):
            self._take(kind, flags, stream_id, payload)
        self.flush()

    # ---- what is sent

    def send(self, call: Call, message: bytes) -> None:
        """See `Call.send`."""
        if call.over or call.end is not None:
            return
        self._open_answer(call)
        data = prefixed(message)
        if not call.to_send and len(data) <= min(call.window, self._window, FRAME_BYTES):
            self._send_piece(call, data)
        else:
            call.to_send.append(memoryview(data))
            self._send_allowed(call)

    def finish(self, call: Call, status: int, trailers: Sequence[Header]) -> None:
        """See `Call.finish`."""
        if call.over or call.end is not None:
            return
        block = b"".join(literal(*header) for header in ((b"grpc-status", b"%d" % status), *trailers))
        call.end = block if call.opened else _OPENING + block
        self._send_allowed(call)

    def flush(self) -> None:
        """Write what is queued; of a connection that is left, close it after the last call."""
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()
        if self._leaving and not self._calls:
            self.close()

    def leave(self) -> None:
        """Take no more calls; those that run go on."""
        if not self._leaving:
            self._leaving = True
            self._out.append(frame(GOAWAY, 0, 0, struct.pack(">II", self._last_stream_id, _NO_ERROR)))
            self.flush()

    def close(self) -> None:
        """Close the connection when all is written."""
        if self._transport is not None:
            self._transport.close()

    def _open_answer(self, call: Call) -> None:
        if not call.opened:
            call.opened = True
            self._out.append(frame(HEADERS, END_HEADERS, call.stream_id, _OPENING))

    def _send_piece(self, call: Call, piece: bytes | memoryview) -> None:
        call.window -= len(piece)
        self._window -= len(piece)
        self._out.append(frame(DATA, 0, call.stream_id, piece))

    def _send_allowed(self, call: Call) -> None:
        """Of what waits, as much as the windows allow, and the end when nothing waits before it."""
        while call.to_send:
            first = call.to_send[0]
            allowed = min(call.window, self._window, FRAME_BYTES)
            if allowed <= 0:
                return
            self._send_piece(call, first[:allowed])
            if allowed < len(first):
                call.to_send[0] = first[allowed:]
            else:
                call.to_send.popleft()
        if call.end is not None:
            self._out.append(frame(HEADERS, END_HEADERS | END_STREAM, call.stream_id, call.end))
            if not call.half_closed:  # it need not send the rest
                self._out.append(_reset(call.stream_id, _NO_ERROR))
            self._forget(call)
        _wake(call)

    def _send_all_allowed(self) -> None:
        for call in [call for call in self._calls.values() if call.to_send]:
            self._send_allowed(call)

    # ---- what comes

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        call = self._calls.get(stream_id)
        if kind == DATA:
            self._take_data(call, flags, payload)
        elif kind == HEADERS:
            payload = unpadded(flags, payload)
            self._block = _Block(stream_id, flags, [payload[5:] if flags & PRIORITY else payload])
        elif kind == CONTINUATION and self._block is not None:
            self._block.parts.append(payload)
        elif kind == RST_STREAM and call is not None:
            self._drop(call)
        elif kind == SETTINGS and not flags & ACK:
            self._set(payload)
        elif kind == PING and not flags & ACK:
            self._out.append(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            self._widen(call, stream_id, int.from_bytes(payload, "big"))
        elif kind == GOAWAY:  # the client begins no more
            self._leaving = True
        if kind in (HEADERS, CONTINUATION) and flags & END_HEADERS and self._block is not None:
            self._open(self._block)
            self._block = None

    def _open(self, block: _Block) -> None:
        headers = self._headers.read(b"".join(block.parts))  # also of one refused: the next ones refer to it
        call = self._calls.get(block.stream_id)
        if block.stream_id > self._last_stream_id and call is None:
            if self._leaving:
                self._out.append(_reset(block.stream_id, _REFUSED_STREAM))
                return
            self._last_stream_id = block.stream_id
            call = Call(self, block.stream_id, headers, self._stream_window)
            self._calls[block.stream_id] = call
            self._service.opened(call)
        if block.flags & END_STREAM and call is not None:
            self._half_close(call)

    def _take_data(self, call: Call | None, flags: int, payload: bytes) -> None:
        self._taken_bytes += len(payload)
        if self._taken_bytes > _REFILL_BYTES:
            self._out.append(_more_window(0, self._taken_bytes))
            self._taken_bytes = 0
        if call is None:
            return
        call.taken_bytes += len(payload)
        if call.taken_bytes > _REFILL_BYTES:
            self._out.append(_more_window(call.stream_id, call.taken_bytes))
            call.taken_bytes = 0
        call.half_closed |= bool(flags & END_STREAM)
        try:
            for message in call.received.whole(unpadded(flags, payload)):
                self._service.asked(call, message)
        except ValueError:
            call.finish(UNIMPLEMENTED, [(b"grpc-message", b"messages are taken uncompressed")])
            self._service.left(call)
            return
        if flags & END_STREAM:
            self._half_close(call)

    def _half_close(self, call: Call) -> None:
        call.half_closed = True
        if not call.over:
            self._service.half_closed(call)

    def _widen(self, call: Call | None, stream_id: int, more: int) -> None:
        if call is not None:
            call.window += more
            if call.to_send:
                self._send_allowed(call)
        elif not stream_id:
            self._window += more
            self._send_all_allowed()

    def _set(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == INITIAL_WINDOW_SIZE:
                for call in self._calls.values():
                    call.window += value - self._stream_window
                self._stream_window = value
        self._out.append(frame(SETTINGS, ACK, 0, b""))
        self._send_all_allowed()

    def _drop(self, call: Call) -> None:
        self._forget(call)
        _wake(call)
        self._service.left(call)

    def _forget(self, call: Call) -> None:
        call.over = True
        call.to_send.clear()
        self._calls.pop(call.stream_id, None)


def _wake(call: Call) -> None:
    if call.room is not None and not call.room.done():
        call.room.set_result(None)
    call.room = None


def _reset(stream_id: int, why: int) -> bytes:
    return frame(RST_STREAM, 0, stream_id, struct.pack(">I", why))


def _more_window(stream_id: int, n_bytes: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, struct.pack(">I", n_bytes))

"""A gRPC server of HTTP/2 frames (RFC 9113) for a fake worker: all messages of a step in one write.

No library: gRPC's own Python server takes tens of microseconds a message, and on a small machine the router
would pay for them. Prior knowledge only, no TLS. What may be sent is what the client's windows allow; ours
are as wide as can be.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from typing import Protocol

from bench.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW,
    WINDOW_UPDATE,
    FrameReader,
    frame,
    wide_windows,
)
from bench.smg_hpack import HeaderReader

_REFILL_BYTES = 1 << 30  # received on a connection before its window is opened again
UNIMPLEMENTED = 12


def literal(name: bytes, value: bytes) -> bytes:
    """A short header that is not indexed (RFC 7541, 6.2.2)."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


_OPENING = b"\x88" + literal(b"content-type", b"application/grpc")  # :status 200


@dataclass(eq=False, slots=True)
class Call:
    """One request and what the client still takes of its answer."""

    connection: GrpcServerConnection
    stream_id: int
    method: str
    window: int
    received: bytes = b""
    opened: bool = False
    over: bool = False

    def send(self, message: bytes) -> bool:
        """Queue a message until `flush`; False when the windows do not allow it now."""
        return self.connection.send(self, message)

    def finish(self, status: int = 0) -> None:
        """Queue the end; nothing is sent after it."""
        self.connection.finish(self, status)

    def flush(self) -> None:
        """Write what is queued on the call's connection."""
        self.connection.flush()


class Service(Protocol):
    """What answers."""

    def asked(self, call: Call, message: bytes) -> None:
        """A whole request is there. The answer may come at any later time."""

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
                self._close()
                return
            self._greeted, data = True, self._greeting[len(PREFACE) :]
        for kind, flags, stream_id, payload in self._frames.whole(data):
            self._take(kind, flags, stream_id, payload)
        self.flush()

    def send(self, call: Call, message: bytes) -> bool:
        """See `Call.send`."""
        size = len(message) + 5
        if call.over or size > min(call.window, self._window):
            return False
        if size > FRAME_BYTES:
            raise ValueError(f"a message of {size} bytes; one frame holds {FRAME_BYTES}")
        call.window -= size
        self._window -= size
        if not call.opened:
            call.opened = True
            self._out.append(frame(HEADERS, END_HEADERS, call.stream_id, _OPENING))
        self._out.append(frame(DATA, 0, call.stream_id, b"\x00" + struct.pack(">I", len(message)) + message))
        return True

    def finish(self, call: Call, status: int) -> None:
        """See `Call.finish`."""
        if call.over:
            return
        block = literal(b"grpc-status", str(status).encode())
        block = block if call.opened else _OPENING + block
        self._out.append(frame(HEADERS, END_HEADERS | END_STREAM, call.stream_id, block))
        call.over = True
        del self._calls[call.stream_id]

    def flush(self) -> None:
        """Write what is queued."""
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        call = self._calls.get(stream_id)
        if kind == DATA:
            self._take_data(call, flags, payload)
        elif kind == HEADERS:
            payload = payload[1 : -payload[0] or None] if flags & PADDED else payload
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
            more = int.from_bytes(payload, "big")
            if call is not None:
                call.window += more
            elif not stream_id:
                self._window += more
        elif kind == GOAWAY and not self._calls:
            self._close()
        if kind in (HEADERS, CONTINUATION) and flags & END_HEADERS and self._block is not None:
            self._open(self._block)
            self._block = None

    def _open(self, block: _Block) -> None:
        method = dict(self._headers.read(b"".join(block.parts))).get(b":path", b"").decode()
        if block.stream_id not in self._calls:  # else trailers
            self._calls[block.stream_id] = Call(self, block.stream_id, method, self._stream_window)
        if block.flags & END_STREAM:
            self._ask(self._calls[block.stream_id])

    def _take_data(self, call: Call | None, flags: int, payload: bytes) -> None:
        self._taken_bytes += len(payload)
        if self._taken_bytes > _REFILL_BYTES:
            self._out.append(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._taken_bytes)))
            self._taken_bytes = 0
        if call is None:
            return
        call.received += payload[1 : -payload[0] or None] if flags & PADDED else payload
        if flags & END_STREAM:
            self._ask(call)

    def _ask(self, call: Call) -> None:
        message, call.received = call.received[5:], b""
        self._service.asked(call, message)

    def _drop(self, call: Call) -> None:
        call.over = True
        del self._calls[call.stream_id]
        self._service.left(call)

    def _set(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == INITIAL_WINDOW_SIZE:
                for call in self._calls.values():
                    call.window += value - self._stream_window
                self._stream_window = value
        self._out.append(frame(SETTINGS, ACK, 0, b""))

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

"""Streams over gRPC as a load generator reads them: HTTP/2 frames (RFC 9113), no client library.

The library's client costs as much CPU for a request as half a router, and on two cores takes it from it.
Headers go out as literals; those that come are not decoded: an answer is whole when its last message says
so, and whoever asks checks that. What may be sent is what the server's windows allow; ours are as wide as
can be.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.fakes.hpack import literal
from bench.fakes.http2_frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
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

Header = tuple[str, str]


@dataclass(eq=False, slots=True)
class _Stream:
    on_message: Callable[[bytes], None]
    ended: asyncio.Future[None]
    window: int
    to_send: deque[bytes] = field(default_factory=deque)  # pieces of the request that wait for windows
    received: MessageReader = field(default_factory=MessageReader)


class GrpcConnection(asyncio.Protocol):
    """One connection; any number of calls at a time. Raises ConnectionError from `call` when it breaks."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        self._streams: dict[int, _Stream] = {}
        self._next_id = 1
        self._window, self._stream_window = WINDOW, WINDOW
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None

    async def call(
        self, method: str, request: bytes, on_message: Callable[[bytes], None], *, metadata: Sequence[Header]
    ) -> None:
        """One request; `on_message` is given each response, and when it returns there are no more."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        stream_id, self._next_id = self._next_id, self._next_id + 2
        ended = asyncio.get_running_loop().create_future()
        stream = self._streams[stream_id] = _Stream(on_message, ended, self._stream_window)
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", self._authority),
        ]
        headers += [("te", "trailers"), ("content-type", "application/grpc"), *metadata]
        block = b"".join(literal(name.encode(), value.encode()) for name, value in headers)
        data = prefixed(request)
        stream.to_send.extend(data[at : at + FRAME_BYTES] for at in range(0, len(data), FRAME_BYTES))
        self._transport.write(frame(HEADERS, END_HEADERS, stream_id, block) + self._sendable(stream_id))
        try:
            await ended
        finally:
            self._streams.pop(stream_id, None)

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(PREFACE + wide_windows())

    def connection_lost(self, exc: Exception | None) -> None:
        for stream in self._streams.values():
            if not stream.ended.done():
                stream.ended.set_exception(exc or ConnectionResetError("the answer has no end"))

    def data_received(self, data: bytes) -> None:
        for kind, flags, stream_id, payload in self._frames.whole(data):
            self._take(kind, flags, stream_id, payload)

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        stream = self._streams.get(stream_id)
        if kind == DATA and stream is not None:
            for message in stream.received.whole(unpadded(flags, payload)):
                stream.on_message(message)
        elif kind == SETTINGS and not flags & ACK:
            self._set(payload)
        elif kind == PING and not flags & ACK:
            self._write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream is not None:
                stream.window += more
            elif not stream_id:
                self._window += more
            self._write(b"".join(map(self._sendable, self._streams)))
        elif kind == GOAWAY:
            self.close()
        ended = kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM)
        if ended and stream is not None and not stream.ended.done():
            stream.ended.set_result(None)

    def _set(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
        self._write(frame(SETTINGS, ACK, 0, b"") + b"".join(map(self._sendable, self._streams)))

    def _sendable(self, stream_id: int) -> bytes:
        """Frames of what the windows allow of a request."""
        stream, frames = self._streams[stream_id], []
        while stream.to_send and len(stream.to_send[0]) <= min(stream.window, self._window):
            piece = stream.to_send.popleft()
            stream.window -= len(piece)
            self._window -= len(piece)
            frames.append(frame(DATA, 0 if stream.to_send else END_STREAM, stream_id, piece))
        return b"".join(frames)

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None:
            self._transport.write(data)

"""Clients that send a large message without an API key: raw HTTP, hence cheap by the thousand."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from abc import ABC, abstractmethod

_CHUNK = b"x" * 16_384
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_END_STREAM = _ACK = 1
_END_HEADERS = 4
_INITIAL_WINDOW = 4  # the setting
_DEFAULT_WINDOW_BYTES = 65_535
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class KeylessClient(ABC):
    """One connection. It stays open after its refusal, until the router or `close` ends it."""

    def __init__(self, port: int, message_bytes: int) -> None:
        self.ended = ""  # "refused" by an answer, or "closed" without one
        self.is_open = False
        self._port = port
        self._message_bytes = message_bytes

    async def send(self) -> None:
        """Connect and send the message, until it is answered or the connection closed."""
        try:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
            self.is_open = True
            await self.exchange()
            self.ended = "refused"
            self._staying = asyncio.create_task(self._stay())
        except (OSError, asyncio.IncompleteReadError):
            self.ended, self.is_open = "closed", False

    def close(self) -> None:
        """Abort the connection."""
        if hasattr(self, "writer"):
            self.writer.transport.abort()

    @abstractmethod
    async def exchange(self) -> None:
        """Send the message and read its answer."""

    @abstractmethod
    async def stay(self) -> None:
        """Read until the router closes; raises what reading raises."""

    async def _stay(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self.stay()
        self.is_open = False


class KeylessGrpcClient(KeylessClient):
    """Sends to RouterService.Generate as fast as HTTP/2's windows allow."""

    async def exchange(self) -> None:
        self._left = self._message_bytes + 5
        self._sent_bytes = 0
        self._connection_window = self._stream_window = _DEFAULT_WINDOW_BYTES
        headers = {
            b":method": b"POST",
            b":scheme": b"http",
            b":path": b"/slipstream.v1.RouterService/Generate",
            b":authority": b"localhost",
            b"te": b"trailers",
            b"content-type": b"application/grpc",
        }
        packed = b"".join(_literal(name, value) for name, value in headers.items())
        self.writer.write(_PREFACE + _frame(_SETTINGS, 0, 0) + _frame(_HEADERS, _END_HEADERS, 1, packed))
        await self._pump()
        while not await self._take_frame():
            await self._pump()

    async def stay(self) -> None:
        while True:
            await self._take_frame()

    async def _pump(self) -> None:
        while self._left and (window := min(self._connection_window, self._stream_window)) > 0:
            size = min(window, len(_CHUNK), self._left)
            data = _CHUNK[:size]
            if not self._sent_bytes:
                data = (struct.pack(">BI", 0, self._message_bytes) + data)[:size]
            self._left -= size
            self._sent_bytes += size
            self._connection_window -= size
            self._stream_window -= size
            self.writer.write(_frame(_DATA, 0 if self._left else _END_STREAM, 1, data))
            await self.writer.drain()

    async def _take_frame(self) -> bool:
        """Read a frame; whether it ended the call."""
        header = await self.reader.readexactly(9)
        payload = await self.reader.readexactly(int.from_bytes(header[:3], "big"))
        kind, flags, stream = header[3], header[4], int.from_bytes(header[5:], "big")
        if kind == _SETTINGS and not flags & _ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == _INITIAL_WINDOW:
                    self._stream_window += value - _DEFAULT_WINDOW_BYTES
            self.writer.write(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self.writer.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream:
                self._stream_window += more
            else:
                self._connection_window += more
        return kind == _RST_STREAM or bool(kind == _HEADERS and flags & _END_STREAM)


class KeylessHttpClient(KeylessClient):
    """Sends to /v1/chat/completions as fast as the socket takes it."""

    async def exchange(self) -> None:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {self._message_bytes}\r\n\r\n"
        )
        self.writer.write(head.encode())
        sending = asyncio.create_task(self._pump())
        try:
            await self.reader.readuntil(b"\r\n\r\n")
        finally:
            sending.cancel()

    async def stay(self) -> None:
        while await self.reader.read(len(_CHUNK)):
            pass

    async def _pump(self) -> None:
        left = self._message_bytes
        with contextlib.suppress(ConnectionError):
            while left:
                self.writer.write(_CHUNK[:left])
                left -= min(left, len(_CHUNK))
                await self.writer.drain()


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value

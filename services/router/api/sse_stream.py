"""An answer of server-sent events, written straight to the connection's transport.

aiohttp's own response builds and checks all headers for each answer, through seven coroutines, and a write is
three more calls. Here the headers are text that all answers of a second share, except for one line, and a
write is one call of the transport.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11

# So much fits into the empty buffer of a connection without pausing it (asyncio: 64 KiB).
_NEVER_WAITS_BYTES = 32 << 10


class EventStream(web.StreamResponse):
    """Use: send(events) ... send(events, last=True), with `drain` awaited after a send that asks for it.

    The headers go out together with the first events, not before.
    """

    def __init__(self, request: web.BaseRequest, headers: Mapping[str, str], *, opening: bytes = b"") -> None:
        """`headers`: the answer's own, as valid as they are. `opening`: what goes before the first events."""
        super().__init__()
        self._client = request.transport
        self._writer = request.writer
        self._in_chunks = request.version >= HttpVersion11  # else the end of the connection ends the answer
        self._stays = self._in_chunks and request.keep_alive
        head = _common_head(int(time.time()), self._in_chunks, self._stays)
        for name, text in headers.items():
            head += f"{name}: {text}\r\n".encode()
        self._head = head + b"\r\n"
        self._opening = opening

    @property
    def begun(self) -> bool:
        """Whether the client was sent anything."""
        return not self._head

    def send(self, events: bytes, *, last: bool = False) -> bool:
        """Write events, at least one. True when `drain` should follow. Raises ConnectionResetError."""
        client = self._client
        if client is None or client.is_closing():
            raise ConnectionResetError("the client is gone")
        if self._opening:
            events, self._opening = self._opening + events, b""
        if self._in_chunks:
            # A chunk without a byte would be the end.
            assert events
            end = b"\r\n0\r\n\r\n" if last else b"\r\n"
            events = b"%b%x\r\n%b%b" % (self._head, len(events), events, end)
        else:
            events = self._head + events
        self._head = b""
        self._writer.output_size += len(events)  # by which aiohttp knows that the answer has begun
        client.write(events)
        return client.get_write_buffer_size() > 0

    @property
    def is_ready(self) -> bool:
        """Whether nothing waits for the client, so that it can be written to at once."""
        client = self._client
        return client is not None and not client.is_closing() and not client.get_write_buffer_size()

    def send_now(self, events: bytes) -> bool:
        """Write events where the client is waited for neither before nor after; else False."""
        if not self.is_ready or len(events) > _NEVER_WAITS_BYTES:
            return False
        self.send(events)
        return True

    async def drain(self) -> None:
        """Returns when the client has read so much that it may get more."""
        await self._writer.drain()

    def cut_off(self) -> None:
        """End the connection at once: what waits to be written fails, and with it the request."""
        if self._client is not None:
            self._client.abort()

    # ---- what aiohttp does with an answer

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may be used again."""
        return self._stays

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Nothing: the headers come with the first events."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing: the end came with the last events."""


@lru_cache(maxsize=4)
def _common_head(now_s: int, in_chunks: bool, stays: bool) -> bytes:
    """What is the same in all answers of a second: status line and headers, without the empty line."""
    lines = [
        f"HTTP/1.{1 if in_chunks else 0} 200 OK",
        "Content-Type: text/event-stream; charset=utf-8",
        "Cache-Control: no-cache",
        "X-Accel-Buffering: no",
        f"Date: {formatdate(now_s, usegmt=True)}",
        f"Server: {SERVER_SOFTWARE}",
    ]
    if in_chunks:
        lines.append("Transfer-Encoding: chunked")
    if not stays:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode() + b"\r\n"

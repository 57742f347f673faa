"""A load generator's streams over HTTP/1.1, without a client library.

A library's client costs more CPU per request than some routers, and on two cores competes with them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from bench.router.stream import Messages, StreamLog

_CHUNKED_END = b"\r\n0\r\n\r\n"
_KEPT_BYTES = 4096  # of the end of a response, which has its usage


class HttpTarget:
    """An OpenAI-style router over HTTP. Connections stay open for later requests."""

    def __init__(self, url: str, *, model: str | None = None) -> None:
        """`model`: the name to send, for routers that need one."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path = parts.path.rstrip("/") + "/v1/chat/completions"
        self._model = model

        self._idle: list[_Connection] = []

    async def stream(
        self, messages: Messages, *, max_tokens: int, session: str = "", want_text: bool = False
    ) -> StreamLog:
        """Run one request to its end. Raises OSError without a connection, or when it breaks."""
        body: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        if self._model is not None:
            body["model"] = self._model
        data = json.dumps(body).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        head += f"x-session-affinity: {session}\r\n\r\n" if session else "\r\n"
        connection = await self._connection()
        log = StreamLog(time.monotonic())
        try:
            status = await connection.ask(head.encode() + data, log, keep_all=want_text)
        except BaseException:
            connection.close()
            raise
        if status != 200:
            log.error = f"HTTP {status}"
        else:
            log.completion_tokens = usage_tokens(connection.tail)
            log.text = sse_text(unchunked(b"".join(connection.pieces))) if want_text else ""
        self._idle.append(connection)
        return log

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection

    async def close(self) -> None:
        """Close all connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self.tail = b""
        self.pieces: list[bytes] = []  # of the body, with its chunk sizes
        self._transport: asyncio.Transport | None = None
        self._log = StreamLog(0.0)
        self._keep_all = False
        self._head = b""
        self._left: int | None = None  # bytes of a body that is not chunked
        self._status = 0
        self._ended: asyncio.Future[int] | None = None

    async def ask(self, request: bytes, log: StreamLog, *, keep_all: bool) -> int:
        """Send a request; returns the status after the complete response."""
        self._log, self._keep_all = log, keep_all
        self.tail, self.pieces, self._head, self._status, self._left = b"", [], b"", 0, None
        self._ended = asyncio.get_running_loop().create_future()
        if not self.is_open:
            raise ConnectionResetError("the server closed the connection")
        assert self._transport is not None
        self._transport.write(request)
        return await self._ended

    @property
    def is_open(self) -> bool:
        """Whether the connection can carry a request."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(exc or ConnectionResetError("the connection ended amid a response"))

    def data_received(self, data: bytes) -> None:
        if not self._status:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._status = int(head[9:12])
            length = head.lower().partition(b"content-length:")[2]
            self._left = int(length.split(b"\r\n")[0]) if length else None
        if has_text(data):
            self._log.arrivals.append(time.monotonic())
        if self._keep_all:
            self.pieces.append(data)
        self.tail = self.tail[-_KEPT_BYTES:] + data
        if self._left is not None:
            self._left -= len(data)
        ended = self.tail.endswith(_CHUNKED_END) if self._left is None else self._left <= 0
        if ended and self._ended is not None and not self._ended.done():
            self._ended.set_result(self._status)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


def has_text(chunk: bytes) -> bool:
    """Whether the chunk has text of the answer."""
    # Opening chunks hold an empty content; routers space JSON in two ways.
    empty = chunk.count(b'"content":""') + chunk.count(b'"content": ""')
    return chunk.count(b'"content":') > empty + chunk.count(b'"content":null') + chunk.count(
        b'"content": null'
    )


def usage_tokens(tail: bytes) -> int:
    """The number of tokens by the usage at a response's end; 0 without one."""
    at = tail.rfind(b'"completion_tokens":')
    return int(tail[at + 20 :].lstrip().split(b",")[0].split(b"}")[0]) if at >= 0 else 0


def unchunked(body: bytes) -> bytes:
    """A complete chunked body without its chunk sizes."""
    parts: Sequence[bytes] = ()
    out: list[bytes] = []
    while body:
        parts = body.split(b"\r\n", 1)
        size = int(parts[0].split(b";")[0], 16)
        out.append(parts[1][:size])
        body = parts[1][size + 2 :] if size else b""
    return b"".join(out)


def sse_text(data: bytes) -> str:
    """The joined text of all events."""
    parts = []
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                parts.append(choice["delta"].get("content") or "")
    return "".join(parts)

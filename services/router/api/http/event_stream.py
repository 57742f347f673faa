"""A streamed HTTP response: server-sent events on aiohttp's stock response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11

from services.router.api.answers.answer_format import AnswerWriter
from services.router.api.http.piece_stream import PIECE_BYTES
from slipstream.v1 import router_pb2

log = logging.getLogger(__name__)

Event = router_pb2.GenerateEvent

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_COMMENT = b": keep-alive\n\n"  # clients skip it
# The empty buffer of a connection takes this much without pausing the writer (asyncio: 64 KiB).
_NEVER_WAITS_BYTES = 32 << 10


class _BufferedResponse(web.StreamResponse):
    # As for aiohttp's whole responses: the headers wait for the first write, which saves a packet.
    _send_headers_immediately = False


class EventStream:
    """Writes events for the handler's task, and directly from the token path while the client keeps up.

    The headers are sent with the first events, so that a failure before the first token has its own status.
    They come earlier, with a comment, when the first token takes long. `answer` must be set before any event.
    """

    def __init__(
        self,
        request: web.Request,
        headers: Callable[[], Mapping[str, str]],
        *,
        write_stall_s: float,
    ) -> None:
        """`headers` are asked for when they are sent."""
        self.response = _BufferedResponse(headers=_HEADERS)
        if request.version < HttpVersion11:
            self.response.force_close()  # without chunks, only the end of the connection ends the body
        self.answer: AnswerWriter | None = None
        self.has_events = False
        # A writer encodes each event once. What is too long to be written directly waits for the next events.
        self._held = b""
        self._opening: bytes | None = None
        self._request = request
        self._headers = headers
        self._write_stall_s = write_stall_s
        self._writer: AbstractStreamWriter | None = None
        self._comments: asyncio.TimerHandle | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client was sent anything."""
        return self.response.prepared

    def try_write(self, events: Sequence[Event]) -> bool:
        """See `DirectWriter`. The handler writes the end itself, because it must return then."""
        if not self._is_writable or self._held:
            return False
        if not events[-1].HasField("delta") or events[-1].delta.prompt_logprobs:
            return False  # rows of a prompt are long, and offsets count each of them once
        if not self.has_events and len(self._opened()) > _NEVER_WAITS_BYTES:
            return False
        data = self.encode(events)
        self.has_events = True
        if len(data) > _NEVER_WAITS_BYTES:
            self._held = data
            return True
        _run_without_waiting(self.response.write(data) if self.has_begun else self._send(data))
        return True

    async def send(self, data: bytes, *, is_last: bool = False) -> None:
        """Write encoded events, and return when the client has read enough. Raises ConnectionResetError.

        A client that takes a piece of them in time is not cut off.
        """
        self.has_events = True
        first, *pieces = [
            data[begin : begin + PIECE_BYTES] for begin in range(0, len(data) or 1, PIECE_BYTES)
        ]
        for piece in pieces:
            await self._send_and_drain(first, is_last=False)
            first = piece
        await self._send_and_drain(first, is_last=is_last)

    @property
    def _is_writable(self) -> bool:
        """Whether a small write neither fails nor waits."""
        client = self._request.transport
        return client is not None and not client.is_closing() and not client.get_write_buffer_size()

    async def keep_alive(self) -> None:
        """Send the headers, unless they were sent, and a comment."""
        await self._send_and_drain(_COMMENT, is_last=False)

    def keep_open(self, every_s: float) -> None:
        """Send a comment now and then until the first event, or `stop_comments`."""
        self._comments = asyncio.get_running_loop().call_later(every_s, self._comment, every_s)

    def stop_comments(self) -> None:
        """Send no more comments."""
        if self._comments is not None:
            self._comments.cancel()

    def _comment(self, every_s: float) -> None:
        if self.has_events:
            return
        if self._is_writable:
            _run_without_waiting(self._send(_COMMENT))
        self.keep_open(every_s)

    async def fail(self, pieces: Iterable[bytes]) -> None:
        """End a stream that has begun with the events of its failure."""
        self.stop_comments()  # one amid the pieces of an event would cut it in two
        data, self._held = self._held, b""
        for piece in pieces:
            if data:
                await self._send_and_drain(data, is_last=False)
            data = piece
        await self._send_and_drain(data, is_last=True)

    def encode(self, events: Sequence[Event]) -> bytes:
        """The events as the client reads them; before the first ones, what opens the answer."""
        answer = self.answer
        assert answer is not None
        data, self._held = self._held, b""
        if not self.has_events:
            data, self._opening = self._opened(), None
        return data + b"".join([answer.delta_event(event.delta) for event in events])

    def _opened(self) -> bytes:
        """What opens the answer, made once."""
        if self._opening is None:
            assert self.answer is not None
            self._opening = self.answer.opening()
        return self._opening

    def encode_end(self, events: Sequence[Event]) -> Iterator[tuple[bytes, int]]:
        """Encode events with the answer's end: one piece, or several that are long.

        Each comes with how many of its bytes are before `closing`, which has begun where that is not all.
        """
        data, answer, finished = self.encode(events[:-1]), self.answer, events[-1].finished
        assert answer is not None
        for piece in answer.before_closing(finished):
            if len(data) >= PIECE_BYTES:
                yield data, len(data)
                data = b""
            data += piece
        n_before = len(data)
        for piece in answer.closing(finished):
            if len(data) >= PIECE_BYTES:
                yield data, n_before
                data, n_before = b"", 0
            data += piece
        yield data, n_before

    async def _send(self, data: bytes, *, is_last: bool = False) -> None:
        if not self.has_begun:
            self.response.headers.update(self._headers())
            self._writer = await self.response.prepare(self._request)
        if is_last:
            await self.response.write_eof(data)
            return
        await self.response.write(data)
        if self._writer is not None:  # aiohttp looks at the connection's buffer once in 64 KiB only
            await self._writer.drain()

    async def _send_and_drain(self, data: bytes, *, is_last: bool) -> None:
        if len(data) <= _NEVER_WAITS_BYTES and self._is_writable:
            await self._send(data, is_last=is_last)
            return
        stall = asyncio.get_running_loop().call_later(self._write_stall_s, self._cut_off)
        try:
            await self._send(data, is_last=is_last)
        finally:
            stall.cancel()

    def _cut_off(self) -> None:
        """Abort the connection: what waits to be written fails, and the request with it."""
        log.warning("a client read nothing for %.0f s and is cut off", self._write_stall_s)
        if self._request.transport is not None:
            self._request.transport.abort()


def _run_without_waiting(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that has nothing to wait for, outside a task."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("a write to an empty buffer waited")

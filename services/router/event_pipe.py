"""From the task that makes a request's events to the face that sends them: bounded, in order, once."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncGenerator

from libs.common.errors import SlipstreamError
from slipstream.v1 import router_pb2

# A slow client stops its own request here; tokens wait joined in its decode sequence.
MAX_WAITING_EVENTS = 32


class EventPipe:
    """One writer, one reader."""

    def __init__(self, *, max_waiting: int = MAX_WAITING_EVENTS) -> None:
        self._events: collections.deque[router_pb2.GenerateResponse] = collections.deque()
        self._max_waiting = max_waiting
        self._changed = asyncio.Event()
        self._closed = False
        self._error: SlipstreamError | None = None

    async def put(self, event: router_pb2.GenerateResponse) -> None:
        """Append an event; waits while too many are unread."""
        while len(self._events) >= self._max_waiting:
            self._changed.clear()
            await self._changed.wait()
        self._events.append(event)
        self._changed.set()

    def close(self, error: SlipstreamError | None = None) -> None:
        """No more events; the reader gets what waits and then `error`, if any."""
        if not self._closed:
            self._closed = True
            self._error = error
            self._changed.set()

    async def events(self) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
        """All events in order; raises the error the pipe was closed with."""
        while True:
            while self._events:
                event = self._events.popleft()
                self._changed.set()
                yield event
            if self._closed:
                if self._error is not None:
                    raise self._error
                return
            self._changed.clear()
            await self._changed.wait()

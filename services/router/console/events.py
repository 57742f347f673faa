"""Live events for the pages: encoded once for all readers, and only while someone reads.

Each reader has a bounded queue. One that does not read is dropped, and delays no other reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec

from libs.common.service_bounds import CONSOLE_READERS
from slipstream.errors import Overloaded

log = logging.getLogger(__name__)

# Lists of changed requests a second, and requests in one list: the newest changes win.
LISTS_PER_S = 20
MAX_LISTED = 200
# Of one reader. A fleet of 100 workers is 60 KB once a second.
MAX_QUEUED_EVENTS = 64
MAX_QUEUED_BYTES = 1 << 20
_FLEET_S = 1.0
_JOBS_S = 2.0


class EventSource(Protocol):
    """Makes the events. Its methods are called only while someone reads."""

    def begin(self) -> None:
        """The first reader came."""

    def end(self) -> None:
        """The last reader left."""

    def fleet(self) -> Awaitable[dict[str, Any]]:
        """The page of the fleet."""

    def rates(self) -> dict[str, Any]:
        """The rates of the last seconds."""

    def jobs(self) -> Awaitable[dict[str, Any]]:
        """The queue of stored jobs."""

    def changed_requests(self, limit: int) -> list[dict[str, Any]]:
        """The summaries of the requests that changed since the last call, at most the newest `limit`."""


class EventReader:
    """The queue of one connection."""

    def __init__(self, abort: Callable[[], None]) -> None:
        """`abort` ends a write that waits for the client."""
        self._abort = abort
        self._events: deque[bytes] = deque()
        self._n_bytes = 0
        self._wake = asyncio.Event()
        self.is_dropped = False

    def put(self, event: bytes) -> None:
        """Queue an event. A reader whose queue is full is dropped."""
        if self.is_dropped:
            return
        if len(self._events) >= MAX_QUEUED_EVENTS or self._n_bytes + len(event) > MAX_QUEUED_BYTES:
            self.drop()
            return
        self._events.append(event)
        self._n_bytes += len(event)
        self._wake.set()

    def drop(self) -> None:
        """End the reader. Idempotent."""
        if self.is_dropped:
            return
        self.is_dropped = True
        self._abort()
        self._events.clear()
        self._n_bytes = 0
        self._wake.set()

    async def next(self) -> bytes:
        """All that waits, joined; empty once the reader is dropped."""
        while not self._events and not self.is_dropped:
            self._wake.clear()
            await self._wake.wait()
        data = b"".join(self._events)
        self._events.clear()
        self._n_bytes = 0
        return data


class EventHub:
    """Sends the events of a source to all readers. `close` drops them."""

    def __init__(
        self,
        source: EventSource,
        *,
        fleet_every_s: float = _FLEET_S,
        lists_per_s: float = LISTS_PER_S,
    ) -> None:
        self._source = source
        self._fleet_every_s = fleet_every_s
        self._list_every_s = 1.0 / lists_per_s
        self._readers: set[EventReader] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def readers(self) -> int:
        """How many read now."""
        return len(self._readers)

    @asynccontextmanager
    async def reading(self, abort: Callable[[], None]) -> AsyncIterator[EventReader]:
        """A reader of the events from now on; see EventReader. Raises Overloaded beyond CONSOLE_READERS."""
        if len(self._readers) >= CONSOLE_READERS:
            raise Overloaded(f"{CONSOLE_READERS} readers follow the events already", retry_after_ms=5000)
        reader = EventReader(abort)
        self._readers.add(reader)
        if len(self._readers) == 1:
            self._begin()
        try:
            yield reader
        finally:
            self._readers.discard(reader)
            if not self._readers:
                self._end()

    async def close(self) -> None:
        """Drop all readers."""
        for reader in self._readers:
            reader.drop()
        tasks = list(self._tasks)
        self._end()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        self._source.begin()
        self._tasks = [
            asyncio.create_task(_repeat(self._send_fleet, self._fleet_every_s), name="console-fleet"),
            asyncio.create_task(_repeat(self._send_requests, self._list_every_s), name="console-requests"),
            asyncio.create_task(_repeat(self._send_jobs, _JOBS_S), name="console-jobs"),
        ]

    def _end(self) -> None:
        if not self._tasks:
            return
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._source.end()

    async def _send_fleet(self) -> None:
        self._send("fleet", await self._source.fleet())
        self._send("rates", self._source.rates())

    async def _send_jobs(self) -> None:
        """Apart from the fleet, which a slow database must not delay."""
        self._send("jobs", await self._source.jobs())

    async def _send_requests(self) -> None:
        if changed := self._source.changed_requests(MAX_LISTED):
            self._send("request", changed)

    def _send(self, name: str, data: Any) -> None:
        event = sse_event(name, data)
        for reader in list(self._readers):
            reader.put(event)


async def _repeat(send: Callable[[], Awaitable[None]], every_s: float) -> None:
    """Send until cancelled. Events that fail once come the next time."""
    while True:
        try:
            await send()
        except Exception:
            log.exception("the console's events failed")
        await asyncio.sleep(every_s)


def sse_event(name: str, data: Any) -> bytes:
    """One event of a stream. JSON on one line holds no line end that could begin another event."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"

"""From the task that makes a request's events to the face that sends them: bounded, in order, once.

A client that reads slower than its tokens come costs one joined delta, then, at MAX_WAITING_BYTES, its
own request's progress (`put` waits), and never another one's.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from libs.common.rpc.raise_once import raise_once
from libs.common.service_bounds import MAX_WAITING_BYTES
from slipstream.errors import SlipstreamError
from slipstream.v1 import router_pb2


class ResponseQueue:
    """One writer, one reader. Deltas that wait together become one where they can."""

    def __init__(self, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._loop = asyncio.get_running_loop()  # once: to ask for it is a system call
        self._events: collections.deque[router_pb2.GenerateEvent] = collections.deque()
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._beyond_start = False  # what the reader waits for: it is not woken for `started`
        self._start_waits = True  # in `next_response`, for the event after it
        self._closed = False
        self._error: SlipstreamError | None = None
        self.on_first_delta: Callable[[], None] | None = None
        # Given a delta that comes alone while the reader waits: so it need not be woken. False: it leaves it.
        self.on_delta: Callable[[router_pb2.Delta], bool] | None = None
        # Whether its reader may want to know where the request ran: else `finished` need not say it.
        self.wants_trail = True
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0

    @property
    def waiting_bytes(self) -> int:
        """Text that was put and not read, about."""
        return self._waiting_bytes

    async def put(self, event: router_pb2.GenerateEvent) -> None:
        """Append an event; waits while too much is unread."""
        if not self.has_room:
            await self.room()
        self._put(event)

    @property
    def has_room(self) -> bool:
        """Whether `put` would not wait."""
        return self._waiting_bytes < self._max_waiting_bytes

    async def room(self) -> None:
        """Returns when `put` would not wait."""
        while not self.has_room:
            self._writer = self._loop.create_future()
            await self._writer

    def _put(self, event: router_pb2.GenerateEvent) -> None:
        kind = event.WhichOneof("kind")
        if kind == "delta":
            self.put_delta(event)
            return
        if kind == "finished":
            usage = event.finished.usage
            self.completion_tokens, self.cached_tokens = usage.completion_tokens, usage.cached_tokens
        elif kind == "started":
            again, self.prompt_tokens = bool(self.prompt_tokens), event.started.prompt_tokens
            if not again:  # else of a request begun anew
                self._events.append(event)
                if not self._beyond_start:
                    _wake(self._reader)
            return
        self._events.append(event)
        _wake(self._reader)

    def put_delta(self, event: router_pb2.GenerateEvent, *, alone: bool = False) -> None:
        """As `put` for a delta, whether there is room or not. One that comes `alone` may go on at once."""
        delta = event.delta
        self.completion_tokens = delta.completion_tokens
        if self.on_first_delta is not None:
            told, self.on_first_delta = self.on_first_delta, None
            told()
        # What others come with waits for them: they go on in one piece.
        if alone and self.on_delta is not None and not self._events:
            reader = self._reader
            if reader is not None and not reader.done() and self.on_delta(delta):
                return
        self._waiting_bytes += size_of(delta)
        last = self._events[-1] if self._events else None
        if last is not None and last.HasField("delta") and join(last.delta, delta):
            return
        self._events.append(event)
        _wake(self._reader)

    def close(self, error: SlipstreamError | None = None) -> None:
        """No more events; the reader gets what waits and then `error`, if any."""
        if not self._closed:
            self._closed = True
            self._error = error
            _wake(self._reader)

    async def next_event(self) -> router_pb2.GenerateEvent | None:
        """The next event, None after the last one; raises the error the pipe was closed with."""
        while not self._events:
            if self._is_over():
                return None
            await self._news()
        return self._take()

    async def next_events(self, *, beyond_start: bool = False) -> list[router_pb2.GenerateEvent]:
        """All events that wait, at least one unless it was the last; raises the error the pipe was closed
        with. `beyond_start`: and not `started` alone, which nobody is woken for then."""
        while not self._events or (beyond_start and self._only_started()):
            if self._is_over():
                break
            await self._news(beyond_start=beyond_start)
        events = list(self._events)
        self._events.clear()
        self._waiting_bytes = 0
        if self._writer is not None:
            _wake(self._writer)
        return events

    async def next_response(self) -> router_pb2.GenerateResponse | None:
        """All events that wait, as one response; None after the last one. `started` waits for the event after
        it, or for `send_start`: by it a client knows that its request is accepted."""
        events = self._events
        while not events or (self._start_waits and self._only_started()):
            if self._is_over():
                break
            await self._news(beyond_start=self._start_waits)
        if not events:
            return None
        self._start_waits = False
        response = router_pb2.GenerateResponse()
        for event in events:
            response.events.add().CopyFrom(event)  # `append` takes several times as long
        events.clear()
        self._waiting_bytes = 0
        if self._writer is not None:
            _wake(self._writer)
        return response

    def send_start(self) -> bool:
        """Make `next_response` return `started` alone. False when `started` was not put yet."""
        if not self._events:
            return False
        self._start_waits = False
        _wake(self._reader)
        return True

    def _take(self) -> router_pb2.GenerateEvent:
        event = self._events.popleft()
        if event.HasField("delta"):
            self._waiting_bytes -= size_of(event.delta)
            _wake(self._writer)
        return event

    def _only_started(self) -> bool:
        return len(self._events) == 1 and self._events[0].HasField("started")

    def _is_over(self) -> bool:
        """Whether nothing more will come. Raises the error the pipe was closed with."""
        if self._closed:
            raise_once(self)
        return self._closed

    def _news(self, *, beyond_start: bool = False) -> asyncio.Future[None]:
        """To be awaited while nothing waits."""
        self._beyond_start = beyond_start
        self._reader = self._loop.create_future()
        return self._reader


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def size_of(delta: router_pb2.Delta) -> int:
    """Characters of text, and bytes of log probabilities. The same before and after `join`."""
    size = len(delta.text) + len(delta.reasoning)
    # To begin a loop over nothing takes as long as all the rest.
    if delta.tool_calls:
        size += sum([len(call.arguments) for call in delta.tool_calls])
    if delta.logprobs:  # up to twenty tokens each
        size += sum([logprob.ByteSize() for logprob in delta.logprobs])
    return size


def join(into: router_pb2.Delta, delta: router_pb2.Delta) -> bool:
    """Append `delta` to the one before it; False where one message cannot tell their order.

    A message says reasoning, then text, then tool calls.
    """
    if (into.text and delta.reasoning) or (into.tool_calls and (delta.text or delta.reasoning)):
        return False
    into.text += delta.text
    into.reasoning += delta.reasoning
    for call in delta.tool_calls:
        last = into.tool_calls[-1] if into.tool_calls else None
        if last is not None and last.index == call.index and not call.id:
            last.arguments += call.arguments
        else:
            into.tool_calls.append(call)
    into.logprobs.extend(delta.logprobs)
    into.completion_tokens = delta.completion_tokens
    return True

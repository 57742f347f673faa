"""The sink of a request's events, read by the HTTP or gRPC handler: bounded, in order, each event once.

The request pushes events and the handler reads them. While the queue is empty, it may write deltas straight
to the client's connection without waking the handler. Deltas for a slow client are joined into one. At
MAX_WAITING_BYTES the queue is full, and pauses its request until the handler has read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from libs.common.rpc.raise_once import raise_once
from libs.common.service_bounds import MAX_WAITING_BYTES
from slipstream.errors import SlipstreamError
from slipstream.v1 import router_pb2


class Producer(Protocol):
    """Writes to a queue while it is not full."""

    def resume(self) -> None:
        """Continue writing: the queue was full, and has room again."""


class DirectWriter(Protocol):
    """Writes events to a client without waiting."""

    def try_write(self, events: Sequence[router_pb2.GenerateEvent]) -> bool:
        """Write all the events, or none of them. Returns False when the connection is not writable."""


class ResponseQueue:
    """A queue with one producer and one reader. It joins waiting deltas where `join` allows it."""

    def __init__(self, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._loop = asyncio.get_running_loop()  # kept, because each get_running_loop() is a system call
        self._events: list[router_pb2.GenerateEvent] = []
        self._max_waiting_bytes = max_waiting_bytes
        self.waiting_bytes = 0  # the approximate size of the unread deltas
        self._readable_since_s = 0.0  # while events wait for a reader that is elsewhere
        self._taken: asyncio.Future[None] | None = None  # while `wait_taken` waits
        self._reader: asyncio.Future[None] | None = None
        self._is_closed = False
        self._error: SlipstreamError | None = None
        self.producer: Producer | None = None
        self.direct_writer: DirectWriter | None = None  # the reader sets it between two reads
        self.wants_stats = True  # whether `finished` carries the request's statistics
        # Whether `started` waits for the event after it, so that one write carries both. The reader sets it.
        self.holds_start = False
        self.prompt_tokens = 0
        self.prompt_rows = 0  # rows of `prompt_logprobs` that were written
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.ttft_ms = 0.0  # from the request's arrival to its first token

    @property
    def is_full(self) -> bool:
        """Whether the producer should pause."""
        return self.waiting_bytes >= self._max_waiting_bytes

    @property
    def unread_s(self) -> float:
        """How long events have been waiting for a reader that is still writing earlier ones."""
        is_reader_waiting = self._reader is not None and not self._reader.done()
        if is_reader_waiting or not self._events:
            return 0.0
        return self._loop.time() - self._readable_since_s

    async def wait_taken(self) -> None:
        """Wait until the reader has taken the events that wait."""
        if self._events:
            self._taken = self._loop.create_future()
            await self._taken

    def write(self, events: Sequence[router_pb2.GenerateEvent]) -> None:
        """Append events, even to a full queue. The reader gets the events of one call together."""
        is_reader_waiting = self._reader is not None and not self._reader.done()
        connection = self.direct_writer if is_reader_waiting and not self._events else None
        if connection is not None and connection.try_write(events):
            self.completion_tokens = events[-1].delta.completion_tokens
            return
        if not self._events:
            self._readable_since_s = self._loop.time()
        for event in events:
            if event.HasField("delta"):
                self._append_delta(event)
            elif event.HasField("finished"):
                usage = event.finished.usage
                self.completion_tokens, self.cached_tokens = usage.completion_tokens, usage.cached_tokens
                self._events.append(event)
            elif not self.prompt_tokens:  # a request that restarts after preemption sends `started` again
                self.prompt_tokens = event.started.prompt_tokens
                self._events.append(event)
        if is_reader_waiting and self._is_readable():
            self._wake_reader()

    def close(self, error: SlipstreamError | None = None) -> None:
        """Accept no more events. The reader gets the waiting events and then `error`, if any."""
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            self._wake_reader()

    def release_start(self) -> None:
        """Let the reader have `started` now, because the next event may take long."""
        self.holds_start = False
        if self._events:
            self._wake_reader()

    async def next_events(self) -> list[router_pb2.GenerateEvent]:
        """Wait for events and return all of them. After the last: an empty list, or the error of `close`."""
        while not self._is_readable():
            if self._is_closed:
                raise_once(self)
                break
            self._reader = self._loop.create_future()
            await self._reader
        was_full = self.is_full
        events, self._events = self._events, []
        self.waiting_bytes = 0
        if self._taken is not None and not self._taken.done():
            self._taken.set_result(None)
        if was_full and self.producer is not None:
            self.producer.resume()
        return events

    def _append_delta(self, event: router_pb2.GenerateEvent) -> None:
        delta = event.delta
        self.completion_tokens = delta.completion_tokens
        self.waiting_bytes += size_of(delta)
        last = self._events[-1] if self._events else None
        if last is None or not last.HasField("delta") or not join(last.delta, delta):
            self._events.append(event)

    def _is_readable(self) -> bool:
        if self.holds_start and len(self._events) == 1:
            return not self._events[0].HasField("started")
        return bool(self._events)

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._readable_since_s = self._loop.time()
            self._reader.set_result(None)


def size_of(delta: router_pb2.Delta) -> int:
    """Characters of text plus bytes of log probabilities. `join` does not change the sum."""
    size = len(delta.text) + len(delta.reasoning)
    # Starting a loop over an empty field takes as long as the rest of this function.
    if delta.tool_calls:
        size += sum([len(call.arguments) for call in delta.tool_calls])
    if delta.logprobs:  # each has up to twenty tokens
        size += sum([logprob.ByteSize() for logprob in delta.logprobs])
    if delta.prompt_logprobs:
        size += sum([logprob.ByteSize() for logprob in delta.prompt_logprobs])
    return size


def join(into: router_pb2.Delta, delta: router_pb2.Delta) -> bool:
    """Append `delta` to the one before it. Returns False if one message cannot keep their order.

    Clients read a message's reasoning first, then its text, then its tool calls.
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
    into.prompt_logprobs.extend(delta.prompt_logprobs)
    into.completion_tokens = delta.completion_tokens
    return True

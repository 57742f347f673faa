"""The serving end of a stream that carries many commands; `multiplexed_client.py` is the other end.

    server = MultiplexedServer(lambda: SomeStream(...))     # a ServerStream
    async def Pins(self, requests, context):
        async with aclosing(server.serve(requests)) as frames:
            async for frame in frames: yield frame

Each command has a handle, and an error of it fails it alone. A frame holds all events that are ready: reading
a frame costs the peer the same whatever it holds. When the call ends, the commands that run are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from libs.common.rpc.raise_once import raise_once
from slipstream import errors

log = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")
StreamT = TypeVar("StreamT", bound="ServerStream[Any, Any]")
# Cancels a running command. Idempotent.
Cancel = Callable[[], object]


class MultiplexedServer(Generic[StreamT]):
    """The open streams of one method."""

    def __init__(self, open_stream: Callable[[], StreamT]) -> None:
        self.streams: set[StreamT] = set()
        self._open_stream = open_stream
        self._is_closing = False

    async def serve(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """The frames of one stream, until its caller ends it and its commands are answered.

        Raises the SlipstreamError that `ServerStream.on_request` raised, once all events were sent.
        """
        stream = self._open_stream()
        self.streams.add(stream)
        if self._is_closing:
            stream.close()
        reader = asyncio.create_task(stream.read(requests), name=type(stream).__name__)
        try:
            while (frame := await stream.next_frame()) is not None:
                yield frame
                stream.on_frame_taken()
            raise_once(stream)
        finally:
            self.streams.discard(stream)
            reader.cancel()
            stream.end()

    def close(self) -> None:
        """Begin no more commands, and end each stream once its running ones are answered."""
        self._is_closing = True
        for stream in self.streams:
            stream.close()

    def reopen(self) -> None:
        """Begin commands of new streams again, after `close`."""
        self._is_closing = False


class ServerStream(ABC, Generic[CommandT, EventT]):
    """One stream: its running commands, and the events that wait to be sent."""

    def __init__(self) -> None:
        self.running: dict[int, Cancel] = {}  # by handle
        self.events: list[EventT] = []
        self.leaving: Sequence[EventT] = ()  # in the frame that was not taken yet
        self.is_closing = False
        self._error: errors.SlipstreamError | None = None  # a request was refused, and the stream with it
        self._changed = asyncio.Event()

    @abstractmethod
    async def on_request(self, request: Any) -> None:
        """`begin` and `cancel` commands as the caller requests. What it raises ends the stream."""

    @abstractmethod
    def frame(self, events: Sequence[EventT]) -> Any:
        """The message with these events."""

    async def join(self) -> None:
        """Wait for more events for the next frame. Without a wait it holds those that are ready."""

    def begin(self, command: CommandT) -> None:
        """Start a command, or fail it. A stream that closes starts none: its end is their answer."""
        handle: int = command.handle  # type: ignore[attr-defined]
        if self.is_closing:
            return
        try:
            if handle in self.running:
                raise errors.FailedPrecondition(f"handle {handle} is in use")
            task, self.running[handle] = self.start(command)
        except Exception as error:
            self.fail(handle, error)
            return
        task.add_done_callback(lambda _: self._on_ended(handle))  # also if cancelled before it ran

    def start(self, command: CommandT) -> tuple[asyncio.Task[None], Cancel]:
        """A task for the command, and what cancels it."""
        task = asyncio.create_task(self._run(command))
        return task, task.cancel

    async def run(self, command: CommandT) -> None:
        """Execute one command and `put` its events. What it raises is the command's failure."""
        raise NotImplementedError

    def failure(self, handle: int, error: errors.SlipstreamError) -> EventT:
        """The last event of a command that fails. Streams without commands need neither this nor `run`."""
        raise NotImplementedError

    def cancel(self, handles: Iterable[int]) -> None:
        """Cancel these commands. Unknown handles are accepted."""
        for handle in handles:
            if handle in self.running:
                self.running[handle]()

    def put(self, event: EventT) -> None:
        """Send an event with the next frame."""
        self.events.append(event)
        self._changed.set()

    def fail(self, handle: int, error: Exception) -> None:
        """Send a command's failure. An error outside the tree of slipstream.errors is logged."""
        if not isinstance(error, errors.SlipstreamError):
            log.error("%s: command %d failed", type(self).__name__, handle, exc_info=error)
            error = errors.Internal("internal error")
        self.put(self.failure(handle, error))

    async def read(self, requests: AsyncIterator[Any]) -> None:
        """Process the caller's requests until it sends no more."""
        try:
            async for request in requests:
                await self.on_request(request)
        except errors.SlipstreamError as error:
            self._error = error.with_traceback(None)  # its frames refer to this stream
        finally:
            self.close()

    async def next_frame(self) -> Any:
        """The next frame when an event is ready; None at the end of the stream."""
        while not self.events:
            if self.is_closing and not self.running:
                return None
            self._changed.clear()
            await self._changed.wait()
        await self.join()
        self.leaving, self.events = self.events, []
        return self.frame(self.leaving)

    def on_frame_taken(self) -> None:
        """The caller of `serve` asked for the next frame, so the last one was sent."""
        self.leaving = ()

    def close(self) -> None:
        """Begin no more commands; the stream ends when the running ones are answered."""
        self.is_closing = True
        self._changed.set()

    def end(self) -> None:
        """The call is over: cancel what runs."""
        self.cancel(list(self.running))

    def _on_ended(self, handle: int) -> None:
        del self.running[handle]
        self._changed.set()

    async def _run(self, command: CommandT) -> None:
        try:
            await self.run(command)
        except Exception as error:
            self.fail(command.handle, error)  # type: ignore[attr-defined]

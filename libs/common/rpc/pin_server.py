"""The lender's side of `KvstoreService.Pins`: a reader's pins on one stream, each as by a call of its own.

    streams = PinServer(servicer, end_pin)
    async def Pins(self, requests, context):
        async for frame in streams.serve(requests): yield frame

What one command raises is its own failure. When the stream ends, commands without an answer are cancelled,
and pins whose answer has not left are ended: nobody will release them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

from slipstream import errors
from slipstream.rpc.rpc_errors import to_failure
from slipstream.v1 import common_pb2, kvstore_pb2

log = logging.getLogger(__name__)

# Commands of one stream without an answer, those whose answer waits to be taken included. As many more are
# refused; then the stream is read no further until its caller has taken what it was told.
MAX_COMMANDS = 64


class PinServicer(Protocol):
    """Executes the commands of the streams. Of the context it may use `time_remaining` only."""

    async def pin(self, request: kvstore_pb2.PinRequest, context: Any) -> kvstore_pb2.PinResponse: ...

    async def renew_pin(
        self, request: kvstore_pb2.RenewPinRequest, context: Any
    ) -> kvstore_pb2.RenewPinResponse: ...

    async def release_pin(
        self, request: kvstore_pb2.ReleasePinRequest, context: Any
    ) -> kvstore_pb2.ReleasePinResponse: ...


class PinServer:
    """The streams of one lender."""

    def __init__(self, servicer: PinServicer, end_pin: Callable[[str], None]) -> None:
        """`end_pin` ends a lease; nothing happens when it has ended."""
        self._servicer = servicer
        self._end_pin = end_pin
        self._streams: set[_Stream] = set()
        self._closed = False

    async def serve(
        self, requests: AsyncIterator[kvstore_pb2.PinsRequest]
    ) -> AsyncGenerator[kvstore_pb2.PinsResponse, None]:
        """The frames of one stream, until its caller ends it and its commands are answered."""
        stream = _Stream(self._servicer, self._end_pin)
        self._streams.add(stream)
        reader = asyncio.create_task(stream.read(requests), name="pin stream")
        if self._closed:
            stream.end_soon()
        try:
            while (frame := await stream.next_frame()) is not None:
                yield frame
                stream.frame_left()
        finally:
            self._streams.discard(stream)
            reader.cancel()
            stream.end()

    def close(self) -> None:
        """End the streams as soon as their commands are answered: their callers may be there for long."""
        self._closed = True
        for stream in self._streams:
            stream.end_soon()


class _Context:
    """Of a call: its deadline."""

    def __init__(self, deadline_s: float | None) -> None:
        self._until_s = None if deadline_s is None else time.monotonic() + deadline_s

    def time_remaining(self) -> float | None:
        return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())


class _Stream:
    def __init__(self, servicer: PinServicer, end_pin: Callable[[str], None]) -> None:
        self._servicer = servicer
        self._end_pin = end_pin
        self._commands: dict[int, asyncio.Task[None]] = {}
        self._answers: list[kvstore_pb2.PinAnswer] = []
        self._leaving: list[kvstore_pb2.PinAnswer] = []
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._no_more = False

    @property
    def unanswered(self) -> int:
        """Commands whose answer was not taken yet."""
        return len(self._commands) + len(self._answers) + len(self._leaving)

    async def next_frame(self) -> kvstore_pb2.PinsResponse | None:
        """All answers that are ready, at least one; None at the end of the stream."""
        while not self._answers:
            if self._no_more and not self._commands:
                return None
            self._changed.clear()
            await self._changed.wait()
        self._leaving, self._answers = self._answers, []
        return kvstore_pb2.PinsResponse(answers=self._leaving)

    def frame_left(self) -> None:
        """The last frame was taken."""
        self._leaving = []
        self._taken.set()

    async def read(self, requests: AsyncIterator[kvstore_pb2.PinsRequest]) -> None:
        """Begin and cancel commands as told. In a stream that closes none begins: its end is their answer."""
        try:
            async for request in requests:
                for command in () if self._no_more else request.commands:
                    while self.unanswered >= 2 * MAX_COMMANDS:
                        self._taken.clear()
                        await self._taken.wait()
                    self._begin(command)
                for handle in request.cancels:
                    task = self._commands.get(handle)
                    if task is not None:
                        task.cancel()
        finally:
            self.end_soon()

    def end_soon(self) -> None:
        """No more answers than those of the commands that run."""
        self._no_more = True
        self._changed.set()

    def end(self) -> None:
        """The stream is over."""
        for task in self._commands.values():
            task.cancel()
        for answer in (*self._leaving, *self._answers):
            if answer.pinned.lease_id:
                self._end_pin(answer.pinned.lease_id)

    def _begin(self, command: kvstore_pb2.PinCommand) -> None:
        handle = command.handle
        if handle in self._commands:
            self._fail(handle, errors.FailedPrecondition(f"handle {handle} is in use"))
        elif self.unanswered >= MAX_COMMANDS:
            self._fail(handle, errors.Overloaded(f"{MAX_COMMANDS} commands of this stream are unanswered"))
        else:
            task = self._commands[handle] = asyncio.create_task(self._run(command))
            task.add_done_callback(lambda _: self._over(handle))  # also of one cancelled before it ran

    async def _run(self, command: kvstore_pb2.PinCommand) -> None:
        handle = command.handle
        deadline_s = command.deadline_ms / 1e3 if command.deadline_ms else None
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._perform(command, _Context(deadline_s))
            self._answers.append(answer)
        except TimeoutError:
            self._fail(handle, errors.DeadlineExceeded("the deadline has passed"))
        except errors.SlipstreamError as error:
            self._fail(handle, error)
        except Exception:
            log.exception("a command of a pin stream failed")
            self._fail(handle, errors.Internal("internal error"))

    def _over(self, handle: int) -> None:
        del self._commands[handle]
        self._changed.set()

    async def _perform(self, command: kvstore_pb2.PinCommand, context: _Context) -> kvstore_pb2.PinAnswer:
        match command.WhichOneof("command"):
            case "pin":
                pinned = await self._servicer.pin(command.pin, context)
                return kvstore_pb2.PinAnswer(handle=command.handle, pinned=pinned)
            case "renew":
                renewed = await self._servicer.renew_pin(command.renew, context)
                return kvstore_pb2.PinAnswer(handle=command.handle, renewed=renewed)
            case "release":
                released = await self._servicer.release_pin(command.release, context)
                return kvstore_pb2.PinAnswer(handle=command.handle, released=released)
        raise errors.InvalidArgument("command", "must be given")

    def _fail(self, handle: int, error: errors.SlipstreamError) -> None:
        failure: common_pb2.Failure = to_failure(error)
        self._answers.append(kvstore_pb2.PinAnswer(handle=handle, failure=failure))
        self._changed.set()

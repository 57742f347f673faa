"""The lender's end of `KvstoreService.Pins`: many pins of a reader on one stream.

    server = PinServer(servicer, end_pin)
    async def Pins(self, requests, context):
        async with aclosing(server.serve(requests)) as frames:
            async for frame in frames: yield frame

When the stream ends, commands without an answer are cancelled, and pins whose answer was not sent are ended:
their reader cannot release them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from libs.common.rpc.multiplexed_server import MultiplexedServer, ServerStream
from slipstream import errors
from slipstream.rpc.rpc_errors import to_failure
from slipstream.v1 import kvstore_pb2

# Commands of one stream whose answer was not taken yet. The 65th to the 128th are refused. With 128 of them
# unanswered the stream is not read until its caller has taken answers.
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


class PinDeadline:
    """Stands in for the context of a call: the deadline of one command."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s

    def time_remaining(self) -> float | None:
        return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())


class PinStream(ServerStream[kvstore_pb2.PinCommand, kvstore_pb2.PinAnswer]):
    """The pins of one reader."""

    def __init__(self, servicer: PinServicer, end_pin: Callable[[str], None]) -> None:
        super().__init__()
        self._servicer = servicer
        self._end_pin = end_pin
        self._taken = asyncio.Event()

    @property
    def unanswered(self) -> int:
        """Commands whose answer was not taken yet."""
        return len(self.running) + len(self.events) + len(self.leaving)

    async def on_request(self, request: kvstore_pb2.PinsRequest) -> None:
        """See `ServerStream`. Waits while the caller takes no answers."""
        for command in request.commands:
            while self.unanswered >= 2 * MAX_COMMANDS:
                self._taken.clear()
                await self._taken.wait()
            self.begin(command)
        self.cancel(request.cancels)

    def start(self, command: kvstore_pb2.PinCommand) -> tuple[asyncio.Task[None], Callable[[], object]]:
        """See `ServerStream`. Raises Overloaded."""
        if self.unanswered >= MAX_COMMANDS:
            raise errors.Overloaded(f"{MAX_COMMANDS} commands of this stream are unanswered")
        return super().start(command)

    async def run(self, command: kvstore_pb2.PinCommand) -> None:
        deadline = PinDeadline(command.deadline_ms / 1e3 if command.deadline_ms else None)
        try:
            async with asyncio.timeout(deadline.timeout_s):
                self.put(await self._answer(command, deadline))
        except TimeoutError:
            raise errors.DeadlineExceeded("the deadline has passed") from None

    async def _answer(self, command: kvstore_pb2.PinCommand, deadline: PinDeadline) -> kvstore_pb2.PinAnswer:
        match command.WhichOneof("command"):
            case "pin":
                pinned = await self._servicer.pin(command.pin, deadline)
                return kvstore_pb2.PinAnswer(handle=command.handle, pinned=pinned)
            case "renew":
                renewed = await self._servicer.renew_pin(command.renew, deadline)
                return kvstore_pb2.PinAnswer(handle=command.handle, renewed=renewed)
            case "release":
                released = await self._servicer.release_pin(command.release, deadline)
                return kvstore_pb2.PinAnswer(handle=command.handle, released=released)
        raise errors.InvalidArgument("command", "must be given")

    def failure(self, handle: int, error: errors.SlipstreamError) -> kvstore_pb2.PinAnswer:
        return kvstore_pb2.PinAnswer(handle=handle, failure=to_failure(error))

    def frame(self, answers: Sequence[kvstore_pb2.PinAnswer]) -> kvstore_pb2.PinsResponse:
        return kvstore_pb2.PinsResponse(answers=answers)

    def on_frame_taken(self) -> None:
        super().on_frame_taken()
        self._taken.set()

    def end(self) -> None:
        """See `ServerStream`: ends the pins whose answer was not sent."""
        super().end()
        for answer in (*self.leaving, *self.events):
            if answer.pinned.lease_id:
                self._end_pin(answer.pinned.lease_id)


class PinServer(MultiplexedServer[PinStream]):
    """The streams of one lender."""

    def __init__(self, servicer: PinServicer, end_pin: Callable[[str], None]) -> None:
        """`end_pin` ends a lease; nothing happens when it has ended."""
        super().__init__(lambda: PinStream(servicer, end_pin))

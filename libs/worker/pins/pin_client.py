"""The reader's end of `KvstoreService.Pins`: one stream to a lender, for all of this worker's pins there.

answer = await client.ask(command, timeout_s=2.0)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import grpc

from libs.common.rpc.multiplexed_client import MultiplexedClient
from libs.common.rpc.pins.server import MAX_COMMANDS
from slipstream import errors
from slipstream.rpc.rpc_errors import from_failure
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc

# Pins without an answer at a time, half of what the server accepts: the rest is for renewals and releases.
MAX_PINS_IN_FLIGHT = MAX_COMMANDS // 2

_Receiver = asyncio.Future[kvstore_pb2.PinAnswer]
# The number is the handle of a command to cancel.
_Command = kvstore_pb2.PinCommand | int


class PinClient(MultiplexedClient[_Receiver, _Command]):
    """Commands to one lender and their answers."""

    def __init__(self, channel: grpc.aio.Channel, *, lender: str) -> None:
        super().__init__(lender)
        self.channel = channel
        self._stub: kvstore_pb2_grpc.KvstoreServiceAsyncStub = kvstore_pb2_grpc.KvstoreServiceStub(channel)
        self._pin_slots = asyncio.Semaphore(MAX_PINS_IN_FLIGHT)
        self._is_retired = False
        self._is_closed = False

    async def ask(self, command: kvstore_pb2.PinCommand, *, timeout_s: float) -> kvstore_pb2.PinAnswer:
        """The answer to a command; its handle and deadline are set here.

        Raises the lender's error, Unavailable when the stream breaks, DeadlineExceeded. A cancel of this
        coroutine cancels the command.
        """
        slot = self._pin_slots if command.HasField("pin") else contextlib.nullcontext()
        try:
            async with asyncio.timeout(timeout_s), slot:
                answer = await self._exchange(command, timeout_s=timeout_s)
        except TimeoutError:
            raise errors.DeadlineExceeded(f"no answer of {self.peer} within {timeout_s:g} s") from None
        if answer.HasField("failure"):
            raise from_failure(answer.failure)
        return answer

    async def _exchange(self, command: kvstore_pb2.PinCommand, *, timeout_s: float) -> kvstore_pb2.PinAnswer:
        # A retired stream may belong to a channel that closes, so it opens no second call.
        if self._is_closed or (self._is_retired and not self.is_open):
            raise errors.Unavailable(f"the stream to {self.peer} was closed")
        command.handle = handle = self.new_handle()
        command.deadline_ms = max(1, int(timeout_s * 1e3))
        answer: _Receiver = asyncio.get_running_loop().create_future()
        self.receivers[handle] = answer
        self.send(command)
        try:
            return await answer
        finally:
            # A command that was not written yet is withdrawn: at a lender that reads nothing they pile up.
            if self.receivers.pop(handle, None) is not None and not self.withdraw(command):
                self.send(handle)
            self._end_when_idle()

    def retire(self) -> None:
        """End the stream when its commands are answered; the caller sends no others."""
        self._is_retired = True
        self._end_when_idle()

    async def close(self) -> None:
        """End the stream now; what is unanswered fails."""
        self._is_closed = True
        await super().close()

    # ---- MultiplexedClient

    def open_call(self) -> grpc.aio.StreamStreamCall[kvstore_pb2.PinsRequest, kvstore_pb2.PinsResponse]:
        return self._stub.Pins()

    def pack(self, commands: Sequence[_Command]) -> Iterator[kvstore_pb2.PinsRequest]:
        cancels = [command for command in commands if isinstance(command, int)]
        others = [command for command in commands if not isinstance(command, int)]
        yield kvstore_pb2.PinsRequest(commands=others, cancels=cancels)

    def dispatch(self, frame: kvstore_pb2.PinsResponse) -> None:
        """Give each answer to its command. Those of cancelled commands are dropped."""
        for answer in frame.answers:
            receiver = self.receivers.pop(answer.handle, None)
            if receiver is not None and not receiver.done():
                receiver.set_result(answer)

    def fail(self, receiver: _Receiver, error: errors.SlipstreamError) -> None:
        if not receiver.done():
            receiver.set_exception(error)

    def _end_when_idle(self) -> None:
        if self._is_retired and not self.receivers:
            self.break_off(errors.Unavailable(f"the stream to {self.peer} was retired"))

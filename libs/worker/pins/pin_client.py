"""The reader's side of `KvstoreService.Pins`: one stream to a lender, for all of this worker's pins there.

    answer = await stream.ask(command, timeout_s=2.0)

Commands of one turn of the event loop travel in one message. Only the stream's own two tasks touch the call:
cancelling a task that writes to a call cancels the whole call, and with it everybody's pins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import grpc

from libs.common.rpc.pin_server import MAX_COMMANDS
from slipstream import errors
from slipstream.rpc.rpc_errors import from_failure, from_rpc_error
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc

log = logging.getLogger(__name__)

# Pins without an answer at a time, half of what the server accepts: the rest is for renewals and releases.
MAX_PINS_IN_FLIGHT = MAX_COMMANDS // 2


class PinClient:
    """Opens its call at once. What comes after its end fails with what ended it."""

    def __init__(self, channel: grpc.aio.Channel, *, lender: str) -> None:
        self.channel = channel
        self._lender = lender
        stub: kvstore_pb2_grpc.KvstoreServiceAsyncStub = kvstore_pb2_grpc.KvstoreServiceStub(channel)
        self._call = stub.Pins()
        self._unanswered: dict[int, asyncio.Future[kvstore_pb2.PinAnswer]] = {}
        self._next = kvstore_pb2.PinsRequest()
        self._written = asyncio.Event()
        self._pin_slots = asyncio.Semaphore(MAX_PINS_IN_FLIGHT)
        self._last_handle = 0
        self._retired = False
        self._error: errors.SlipstreamError | None = None
        self._reader = asyncio.create_task(self._read(), name=f"pins of {lender}")

    @property
    def ended(self) -> bool:
        """Whether it takes no more commands."""
        return self._error is not None

    async def ask(self, command: kvstore_pb2.PinCommand, *, timeout_s: float) -> kvstore_pb2.PinAnswer:
        """The answer to a command; its handle and deadline are set here.

        Raises the lender's error, Unavailable when the stream breaks, DeadlineExceeded. A cancel of this
        coroutine cancels the command.
        """
        slot = self._pin_slots if command.HasField("pin") else contextlib.nullcontext()
        try:
            async with asyncio.timeout(timeout_s), slot:
                answer = await self._send(command, timeout_s=timeout_s)
        except TimeoutError:
            raise errors.DeadlineExceeded(f"no answer of {self._lender} within {timeout_s:g} s") from None
        if answer.HasField("failure"):
            raise from_failure(answer.failure)
        return answer

    async def _send(self, command: kvstore_pb2.PinCommand, *, timeout_s: float) -> kvstore_pb2.PinAnswer:
        if self._error is not None:
            raise self._error
        command.handle = handle = self._new_handle()
        command.deadline_ms = max(1, int(timeout_s * 1e3))
        answered: asyncio.Future[kvstore_pb2.PinAnswer] = asyncio.get_running_loop().create_future()
        self._unanswered[handle] = answered
        self._next.commands.append(command)
        self._written.set()
        try:
            return await answered
        finally:
            if self._unanswered.pop(handle, None) is not None and not self._take_back(handle):
                self._next.cancels.append(handle)
                self._written.set()
            self._end_when_idle()

    def retire(self) -> None:
        """End it when its commands are answered; no others must come."""
        self._retired = True
        self._end_when_idle()

    async def close(self) -> None:
        """End it now; what is unanswered fails."""
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def _end_when_idle(self) -> None:
        if self._retired and not self._unanswered:
            self._call.cancel()

    def _take_back(self, handle: int) -> bool:
        """Whether the command had not left yet: to a lender that takes nothing they must not pile up."""
        for i, command in enumerate(self._next.commands):
            if command.handle == handle:
                del self._next.commands[i]
                return True
        return False

    def _new_handle(self) -> int:
        self._last_handle = self._last_handle % 0xFFFF_FFFF + 1
        while self._last_handle in self._unanswered:
            self._last_handle = self._last_handle % 0xFFFF_FFFF + 1
        return self._last_handle

    async def _read(self) -> None:
        writer = asyncio.create_task(self._write())
        error: errors.SlipstreamError = errors.Unavailable(f"{self._lender} ended the stream")
        try:
            async for frame in self._call:
                for answer in frame.answers:
                    answered = self._unanswered.pop(answer.handle, None)
                    if answered is not None and not answered.done():
                        answered.set_result(answer)
        except grpc.aio.AioRpcError as broken:
            error = errors.Unavailable(f"{self._lender}: {from_rpc_error(broken).message}")
        except asyncio.CancelledError:
            error = errors.Unavailable(f"the stream to {self._lender} was closed")
        finally:
            self._error = error
            writer.cancel()
            self._call.cancel()  # so that the lender, if it is still there, hears of the end
            unanswered, self._unanswered = self._unanswered, {}
            for answered in unanswered.values():
                if not answered.done():
                    answered.set_exception(error)
            log.info("pins of %s: %s", self._lender, error)

    async def _write(self) -> None:
        """Until cancelled, or the call breaks: its reader notices that, too."""
        try:
            while True:
                await self._written.wait()
                self._written.clear()
                message, self._next = self._next, kvstore_pb2.PinsRequest()
                await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        except Exception:
            log.exception("pins of %s: a command could not be written", self._lender)
            self._call.cancel()

"""The reader's side of `KvstoreService.Pins`: one stream to a lender, for all of this worker's pins there.

    answer = await stream.ask(command, timeout_s=2.0)

Commands of one turn of the event loop travel in one message. Only the stream's own two tasks touch the call:
cancelling a task that writes to a call cancels the whole call, and with it everybody's pins.
"""

from __future__ import annotations

import asyncio
import logging

import grpc

from slipstream import errors
from slipstream.rpc_errors import from_failure, from_rpc_error
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc

log = logging.getLogger(__name__)

_UNKNOWN = grpc.StatusCode.UNIMPLEMENTED
# Where the end of a stream overtakes a write, gRPC tells this, whatever the lender said (grpc/grpc#36066).
_UNTOLD = grpc.StatusCode.INTERNAL


class StreamUnknown(errors.Unavailable):
    """The lender is older than the stream, or does not offer it: ask by single calls."""


class StreamUnheard(StreamUnknown):
    """It ended before anything came, and nobody knows why: this one command is to be a single call."""


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
        self._last_handle = 0
        self._retired = False
        self._error: errors.SlipstreamError | None = None
        self._reader = asyncio.create_task(self._read(), name=f"pins of {lender}")

    @property
    def ended(self) -> bool:
        """Whether it takes no more commands."""
        return self._error is not None

    @property
    def unanswered(self) -> int:
        """Commands without an answer."""
        return len(self._unanswered)

    async def ask(self, command: kvstore_pb2.PinCommand, *, timeout_s: float) -> kvstore_pb2.PinAnswer:
        """The answer to a command; its handle and deadline are set here.

        Raises what the lender says, Unavailable when the stream breaks, StreamUnknown, DeadlineExceeded. Who
        is cancelled here cancels the command.
        """
        if self._error is not None:
            raise self._error
        command.handle = handle = self._new_handle()
        command.deadline_ms = max(1, int(timeout_s * 1e3))
        answered = self._unanswered[handle] = asyncio.get_running_loop().create_future()
        self._next.commands.append(command)
        self._written.set()
        try:
            async with asyncio.timeout(timeout_s):
                answer: kvstore_pb2.PinAnswer = await answered
        except TimeoutError:
            raise errors.DeadlineExceeded(f"no answer of {self._lender} within {timeout_s:g} s") from None
        finally:
            if self._unanswered.pop(handle, None) is not None and not self._take_back(handle):
                self._next.cancels.append(handle)
                self._written.set()
            self._end_when_idle()
        if answer.HasField("failure"):
            raise from_failure(answer.failure)
        return answer

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
        heard = False
        try:
            async for frame in self._call:
                heard = True
                for answer in frame.answers:
                    answered = self._unanswered.pop(answer.handle, None)
                    if answered is not None and not answered.done():
                        answered.set_result(answer)
        except grpc.aio.AioRpcError as broken:
            message = f"{self._lender}: {from_rpc_error(broken).message}"
            error = errors.Unavailable(message)
            if broken.code() == _UNKNOWN:
                error = StreamUnknown(message)
            elif broken.code() == _UNTOLD and not heard:
                error = StreamUnheard(message)
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

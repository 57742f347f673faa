"""The calling end of a stream that carries many commands; `multiplexed_server.py` is the other end.

A command has a handle, and whatever receives its answers is registered under that handle. The call opens with
the first command and stays open. When it breaks, everything registered fails, and the next command opens
another call. Commands sent in one iteration of the event loop are written in one message. A write costs its
call, its threads and their wake-ups at both ends, whatever it carries.

Only the stream's own two tasks wait at the call. Cancelling a task that waits for its write cancels the whole
call, and with it the work of all other requests.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc

from slipstream import errors
from slipstream.rpc.rpc_errors import from_rpc_error

log = logging.getLogger(__name__)

# A message holds commands of about this many bytes at most, and one of any size.
BATCH_BYTES = 1 << 20
_MAX_HANDLE = 0xFFFF_FFFF

# gRPC's words for a connection that it closed because nothing answered. Of a process that ended, the kernel
# closes the connections ("Socket closed", "Connection reset by peer").
_UNANSWERED = "ping timeout"

ReceiverT = TypeVar("ReceiverT")
CommandT = TypeVar("CommandT")


class PeerUnanswering(errors.Unavailable):
    """The peer answered no ping. It stands still, or the network drops its packets; it has not crashed."""


class MultiplexedClient(ABC, Generic[ReceiverT, CommandT]):
    """One stream to one peer. `receivers` are those of commands whose last answer has not come, by handle."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.receivers: dict[int, ReceiverT] = {}
        self._last_handle = 0
        self._call: _OpenCall | None = None

    @abstractmethod
    def open_call(self) -> Any:
        """A new bidirectional call."""

    @abstractmethod
    def pack(self, commands: Sequence[CommandT]) -> Iterable[Any]:
        """The messages for these commands."""

    @abstractmethod
    def dispatch(self, frame: Any) -> None:
        """Give a frame's content to its receivers. What it raises ends the stream."""

    async def wait_room(self) -> None:
        """Return when the next frame may be read; frames that are not read wait at the peer."""

    @abstractmethod
    def fail(self, receiver: ReceiverT, error: errors.SlipstreamError) -> None:
        """The stream broke: `receiver`, not registered any more, gets nothing else."""

    def on_broken(self) -> None:
        """Reset what was assumed of the process at the other end; the next call may reach another one."""

    @property
    def is_open(self) -> bool:
        """Whether there is a call."""
        return self._call is not None

    @property
    def waiting_commands(self) -> int:
        """Commands not written yet."""
        return len(self._call.waiting) if self._call is not None else 0

    def new_handle(self) -> int:
        """A handle that is not in use, from 1 on."""
        while True:
            self._last_handle = self._last_handle % _MAX_HANDLE + 1
            if self._last_handle not in self.receivers:
                return self._last_handle

    def send(self, command: CommandT) -> None:
        """Write a command in the next iteration of the event loop, opening the call if there is none.

        Where no call can be opened, all receivers fail in the next iteration.
        """
        if self._call is None:
            try:
                self._call = self._open()
            except Exception as refused:  # gRPC's, for a channel that is closed
                log.warning("stream to %s could not be opened: %s", self.peer, refused)
                self._fail_all(errors.Unavailable(f"no stream to {self.peer} can be opened"), soon=True)
                return
        self._call.put(command)

    def withdraw(self, command: CommandT) -> bool:
        """Whether the command was not written yet, and never will be."""
        waiting = self._call.waiting if self._call is not None else []
        for position, other in enumerate(waiting):
            if other is command:
                del waiting[position]
                return True
        return False

    def break_off(self, error: errors.SlipstreamError) -> None:
        """Cancel the call, so that a peer that only fell silent ends its work when it wakes up, and fail all
        receivers with `error`."""
        call, self._call = self._call, None
        if call is not None:
            call.grpc_call.cancel()
        self._fail_all(error)

    async def close(self) -> None:
        """End the call; the peer ends what still runs for it, and all receivers fail."""
        call = self._call
        if call is not None:
            call.grpc_call.cancel()
            if call.reader is not None:
                await asyncio.gather(call.reader, return_exceptions=True)

    def _open(self) -> _OpenCall:
        # The call outlives the request that opens it, and belongs to no request's trace.
        empty = contextvars.Context()
        call = _OpenCall(empty.run(self.open_call))
        call.reader = asyncio.create_task(self._read(call), name=f"stream {self.peer}", context=empty)
        return call

    def _fail_all(self, error: errors.SlipstreamError, *, soon: bool = False) -> None:
        receivers, self.receivers = self.receivers, {}
        self.on_broken()
        if soon:
            asyncio.get_running_loop().call_soon(self._fail_each, receivers.values(), error)
        else:
            self._fail_each(receivers.values(), error)

    def _fail_each(self, receivers: Iterable[ReceiverT], error: errors.SlipstreamError) -> None:
        for receiver in receivers:
            try:
                self.fail(receiver, error)
            except Exception:  # the other receivers must fail too
                log.exception("stream to %s: a receiver raised while it failed", self.peer)

    async def _read(self, call: _OpenCall) -> None:
        writer = asyncio.create_task(self._write(call))
        error: errors.SlipstreamError = errors.Unavailable(f"{self.peer} ended the stream")
        try:
            async for frame in call.grpc_call:
                self.dispatch(frame)
                await self.wait_room()
        except grpc.aio.AioRpcError as broken:
            kind = PeerUnanswering if _is_unanswered(broken) else errors.Unavailable
            error = kind(f"{self.peer}: {from_rpc_error(broken).message}")
        except asyncio.CancelledError:
            error = errors.Unavailable(f"the stream to {self.peer} was closed")
        except Exception:
            log.exception("stream to %s: a frame could not be read", self.peer)
            error = errors.Unavailable(f"{self.peer} sent a frame that cannot be read")
        finally:
            writer.cancel()
            call.grpc_call.cancel()  # the peer ends what still runs for this call
            if self._call is call:
                self._call = None
                self._fail_all(error)
            log.info("stream to %s ended: %s", self.peer, error)

    async def _write(self, call: _OpenCall) -> None:
        """Until cancelled, or until the call breaks, which the reader notices too."""
        try:
            while True:
                for message in self.pack(await call.take()):
                    await call.grpc_call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        except Exception:
            log.exception("stream to %s: a command could not be written", self.peer)
            call.grpc_call.cancel()


def _is_unanswered(broken: grpc.aio.AioRpcError) -> bool:
    """Whether a ping without an answer ended the call. A failure of the peer may quote any words."""
    is_lost = broken.code() is grpc.StatusCode.UNAVAILABLE
    return is_lost and _UNANSWERED in (broken.details() or "")


def batches(commands: Sequence[CommandT]) -> Iterator[list[CommandT]]:
    """The commands in order, in batches of BATCH_BYTES. Numbers count as no bytes."""
    if len(commands) == 1:  # measuring a message encodes it
        yield list(commands)
        return
    batch: list[CommandT] = []
    n_bytes = 0
    for command in commands:
        size = 0 if isinstance(command, int) else command.ByteSize()  # type: ignore[attr-defined]
        n_bytes += size
        if batch and n_bytes > BATCH_BYTES:
            yield batch
            batch, n_bytes = [], size
        batch.append(command)
    yield batch


class _OpenCall:
    """One call and the commands that wait to be written to it."""

    def __init__(self, grpc_call: Any) -> None:
        self.grpc_call = grpc_call
        self.reader: asyncio.Task[None] | None = None
        self.waiting: list[Any] = []
        self._writer: asyncio.Future[None] | None = None  # it waits for commands

    def put(self, command: Any) -> None:
        """Have the writer take the command with all that come before the next iteration of the event loop."""
        self.waiting.append(command)
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    async def take(self) -> list[Any]:
        """All commands that wait, at least one."""
        while not self.waiting:
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        waiting, self.waiting = self.waiting, []
        return waiting

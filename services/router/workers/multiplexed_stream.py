"""One bidirectional call of this router and a worker, opened with its first command and open from then on.

Commands that are sent in one iteration of the event loop are written in one message: a write costs its call,
its threads and their wake-ups at both ends, whatever it carries.
Only the stream's own two tasks wait at the call. To cancel a task that waits for its write cancels the whole
call, and with it the work of all other requests.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import grpc

from slipstream import errors
from slipstream.rpc.rpc_errors import from_rpc_error

log = logging.getLogger(__name__)

# A message holds commands of about this many bytes at most, and one of any size.
BATCH_BYTES = 1 << 20

Command = TypeVar("Command")
Frame = TypeVar("Frame")
_Sent = TypeVar("_Sent", contravariant=True)
_Received = TypeVar("_Received", contravariant=True)


class StreamOwner(Protocol[_Sent, _Received]):
    """What a stream carries, and what becomes of it."""

    def open_call(self) -> Any:
        """A new bidirectional call."""
        ...

    def pack(self, commands: Sequence[_Sent]) -> Iterable[Any]:
        """The messages for these commands."""
        ...

    def take(self, frame: _Received) -> None:
        """Process a frame. What it raises ends the stream."""
        ...

    def on_stream_failed(self, error: errors.SlipstreamError) -> None:
        """The call ended, and not by `break_off`."""
        ...


class MultiplexedStream(Generic[Command, Frame]):
    """See the module's text."""

    def __init__(self, name: str, owner: StreamOwner[Command, Frame]) -> None:
        self._name = name
        self._owner = owner
        self._connection: _Connection | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a call."""
        return self._connection is not None

    @property
    def waiting(self) -> int:
        """Commands not taken by the call yet."""
        return self._connection.waiting if self._connection is not None else 0

    def send(self, command: Command) -> None:
        """Write a command soon, opening the call if there is none."""
        connection = self._connection
        if connection is None:
            # The call outlives the request that opens it, and belongs to no request's trace.
            empty = contextvars.Context()
            connection = self._connection = _Connection(empty.run(self._owner.open_call), self._owner.pack)
            connection.reader = asyncio.create_task(self._read(connection), context=empty)
        connection.put(command)

    def break_off(self) -> None:
        """Cancel the call without calling `on_stream_failed`. The next command opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.call.cancel()

    async def close(self) -> None:
        """End the call; `on_stream_failed` is called."""
        connection = self._connection
        if connection is not None:
            connection.call.cancel()
            if connection.reader is not None:
                await asyncio.gather(connection.reader, return_exceptions=True)

    async def _read(self, connection: _Connection) -> None:
        writer = asyncio.create_task(self._write(connection))
        error: errors.SlipstreamError = errors.Unavailable(f"{self._name} ended the stream")
        try:
            async for frame in connection.call:
                self._owner.take(frame)
        except grpc.aio.AioRpcError as broken:
            error = errors.Unavailable(f"{self._name}: {from_rpc_error(broken).message}")
        except asyncio.CancelledError:
            error = errors.Unavailable(f"the stream to {self._name} was closed")
        except Exception:
            log.exception("stream to %s: a frame could not be read", self._name)
            error = errors.Unavailable(f"{self._name} sent a frame that cannot be read")
        finally:
            writer.cancel()
            connection.call.cancel()  # so that the worker ends what it still runs for this call
            if self._connection is connection:
                self._connection = None
                self._owner.on_stream_failed(error)
            log.info("stream to %s ended: %s", self._name, error)

    async def _write(self, connection: _Connection) -> None:
        """Until cancelled, or until the call breaks, which the reader notices too."""
        try:
            while True:
                await connection.write_some()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        except Exception:
            log.exception("stream to %s: a command could not be written", self._name)
            connection.call.cancel()


def batches(commands: Sequence[Command], size: Callable[[Command], int]) -> Iterator[list[Command]]:
    """The commands in order, in messages of BATCH_BYTES by `size`."""
    if len(commands) == 1:  # to look at the size of a long prompt copies it
        yield [commands[0]]
        return
    batch: list[Command] = []
    n_bytes = 0
    for command in commands:
        n_bytes += size(command)
        if batch and n_bytes > BATCH_BYTES:
            yield batch
            batch, n_bytes = [], size(command)
        batch.append(command)
    yield batch


class _Connection:
    """One call and the commands that wait to be written to it."""

    def __init__(self, call: Any, pack: Callable[[Sequence[Any]], Iterable[Any]]) -> None:
        self.call = call
        self.reader: asyncio.Task[None] | None = None
        self._pack = pack
        self._waiting: list[Any] = []
        self._writer: asyncio.Future[None] | None = None  # it waits for commands
        self._loop = asyncio.get_running_loop()

    @property
    def waiting(self) -> int:
        """Commands not taken yet."""
        return len(self._waiting)

    def put(self, command: Any) -> None:
        """Write the command in the next iteration of the event loop, with all that come before then."""
        self._waiting.append(command)
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    async def write_some(self) -> None:
        """Write all that wait, at least one."""
        if not self._waiting:
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        waiting, self._waiting = self._waiting, []
        for message in self._pack(waiting):
            await self.call.write(message)

"""How a stream to a worker ends: whatever ends it, those who wait on it are told, and the worker is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from services.router.workers.multiplexed_stream import MultiplexedStream
from slipstream import errors
from tests.router.conftest import eventually


class Call:
    """One call, as grpc.aio's: its frames are what the test puts in; None is the cancel."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[int | None] = asyncio.Queue()
        self.written: list[Any] = []
        self.cancelled = False

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> int:
        frame = await self.frames.get()
        if frame is None:
            raise asyncio.CancelledError
        return frame

    async def write(self, message: Any) -> None:
        self.written.append(message)

    def cancel(self) -> None:
        self.cancelled = True
        self.frames.put_nowait(None)


class Owner:
    """Makes calls, writes each batch of commands as one message, and notes why a stream failed."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.failures: list[errors.SlipstreamError] = []

    def open_call(self) -> Call:
        self.calls.append(Call())
        return self.calls[-1]

    def pack(self, commands: Sequence[Any]) -> Iterable[Any]:
        return [list(commands)]

    def take(self, frame: int) -> None:
        if frame < 0:
            raise ValueError("packed fields of different lengths")

    def on_stream_failed(self, error: errors.SlipstreamError) -> None:
        self.failures.append(error)


async def test_a_frame_that_cannot_be_read_ends_the_stream_on_both_sides() -> None:
    owner = Owner()
    calls, failures = owner.calls, owner.failures
    stream: MultiplexedStream[str, int] = MultiplexedStream("decode-0", owner)
    stream.send("start")
    await eventually(lambda: calls[0].written == [["start"]])
    calls[0].frames.put_nowait(1)
    calls[0].frames.put_nowait(-1)
    await eventually(lambda: bool(failures))
    assert isinstance(failures[0], errors.Unavailable)
    assert calls[0].cancelled
    assert not stream.is_open
    stream.send("again")
    await eventually(lambda: len(calls) == 2 and calls[1].written == [["again"]])
    calls[1].frames.put_nowait(-1)
    await eventually(lambda: len(failures) == 2)


async def test_a_command_that_cannot_be_written_ends_the_stream() -> None:
    class Fails(Owner):
        def pack(self, commands: Sequence[int]) -> Iterable[int]:
            return [1 // command for command in commands]

    owner = Fails()
    failures = owner.failures
    stream: MultiplexedStream[int, int] = MultiplexedStream("decode-0", owner)
    stream.send(1)
    stream.send(0)
    await eventually(lambda: bool(failures))
    assert isinstance(failures[0], errors.Unavailable)
    assert owner.calls[0].cancelled


async def test_commands_of_one_iteration_of_the_event_loop_are_one_message() -> None:
    owner = Owner()
    stream: MultiplexedStream[str, int] = MultiplexedStream("prefill-0", owner)
    stream.send("opens it")
    (call,) = owner.calls
    await eventually(lambda: bool(call.written))
    stream.send("alone")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert call.written[1:] == [["alone"]]
    stream.send("two")
    stream.send("together")
    await eventually(lambda: len(call.written) > 2)
    assert call.written[2:] == [["two", "together"]]

    async def broken(_: object) -> None:
        raise asyncio.InvalidStateError("the call is over")

    call.write = broken  # type: ignore[method-assign,assignment]
    stream.send("lost")  # raises nothing: the stream's reader notices the end
    await asyncio.sleep(0)
    assert len(call.written) == 3
    await stream.close()

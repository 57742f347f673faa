"""The serving end of a multiplexed stream: isolation of commands, refused requests, ends."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from libs.common.rpc.multiplexed_server import MultiplexedServer, ServerStream
from slipstream import errors


@dataclass
class Command:
    """`what`: "wait" until it is cancelled, "raise", or an event to send."""

    handle: int
    what: str


class Stream(ServerStream[Command, str]):
    """Requests are commands, handles to cancel, or an error to raise; frames are lists of events."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ended = False

    async def on_request(self, request: Command | int | Exception) -> None:
        if isinstance(request, Exception):
            raise request
        if isinstance(request, int):
            self.cancel([request])
        else:
            self.begin(request)

    async def run(self, command: Command) -> None:
        if command.what == "wait":
            await asyncio.Event().wait()
        if command.what == "raise":
            raise ZeroDivisionError
        self.put(command.what)

    def failure(self, handle: int, error: errors.SlipstreamError) -> str:
        return f"{handle} {type(error).__name__}"

    def frame(self, events: Sequence[str]) -> list[str]:
        return list(events)

    def end(self) -> None:
        super().end()
        self.is_ended = True


class Caller:
    """The other end, without gRPC."""

    def __init__(self, server: MultiplexedServer[Stream]) -> None:
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self.frames: AsyncGenerator[list[str], None] = server.serve(self._incoming())

    async def _incoming(self) -> AsyncIterator[Any]:
        while (request := await self._requests.get()) is not None:
            yield request

    def send(self, *requests: Any) -> None:
        for request in requests:
            self._requests.put_nowait(request)

    async def next(self) -> list[str] | None:
        async with asyncio.timeout(60):
            return await anext(self.frames, None)


async def test_commands_fail_alone_and_what_is_ready_shares_a_frame() -> None:
    caller = Caller(MultiplexedServer(Stream))
    caller.send(Command(1, "wait"), Command(2, "raise"), Command(1, "again"), Command(3, "three"))
    events: list[str] = []
    while len(events) < 3:
        events += await caller.next() or ()
    assert sorted(events) == ["1 FailedPrecondition", "2 Internal", "three"]
    caller.send(1, 77, None)  # the first command still runs: its handle is known, the other one is not
    assert await caller.next() is None


async def test_a_request_that_is_refused_ends_the_stream_after_the_events_before_it() -> None:
    server = MultiplexedServer(Stream)
    caller = Caller(server)
    caller.send(Command(1, "one"), errors.InvalidArgument("width", "must be 8"))
    assert await caller.next() == ["one"]
    with pytest.raises(errors.InvalidArgument, match="width"):
        await caller.next()
    assert not server.streams


async def test_a_server_that_closes_begins_nothing_and_ends_streams_when_they_are_idle() -> None:
    server = MultiplexedServer(Stream)
    busy, idle = Caller(server), Caller(server)
    ends = asyncio.create_task(idle.next())
    busy.send(Command(1, "wait"), Command(2, "two"))
    assert await busy.next() == ["two"]
    server.close()
    assert await ends is None
    assert await Caller(server).next() is None
    last = asyncio.create_task(busy.next())
    busy.send(Command(3, "late"), 1)
    assert await last is None
    assert not server.streams


async def test_a_call_that_is_over_cancels_its_commands_and_knows_what_was_not_sent() -> None:
    server = MultiplexedServer(Stream)
    caller = Caller(server)
    caller.send(Command(1, "one"), Command(2, "wait"))
    assert await caller.next() == ["one"]
    (stream,) = server.streams
    stream.put("not sent")
    await caller.frames.aclose()
    assert (stream.leaving, stream.events, stream.is_ended) == (["one"], ["not sent"], True)
    async with asyncio.timeout(60):
        while stream.running:
            await asyncio.sleep(0)


async def test_a_refused_stream_that_is_not_served_to_its_end_is_freed_without_the_collector() -> None:
    async def requests() -> AsyncIterator[Exception]:
        yield errors.InvalidArgument("width", "must be 8")

    stream = Stream()
    gc.disable()
    try:
        await stream.read(requests())
        freed = weakref.ref(stream)
        del stream
        assert freed() is None
    finally:
        gc.enable()

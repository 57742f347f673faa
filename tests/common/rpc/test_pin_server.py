"""The lender's side of a pin stream: what each command gets, and what is left when the stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from libs.common.rpc.pins.server import MAX_COMMANDS, PinServer
from slipstream import errors
from slipstream.rpc.rpc_errors import from_failure
from slipstream.v1 import kvstore_pb2

WAIT_S = 60.0


class Lender:
    """Pins wait until they are let through; their names are their leases."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.making: set[str] = set()
        self.left_s: list[float | None] = []
        self.go_on = asyncio.Event()

    async def pin(self, request: kvstore_pb2.PinRequest, context: Any) -> kvstore_pb2.PinResponse:
        self.left_s.append(context.time_remaining())
        self.making.add(request.name)
        try:
            if not request.owner:
                await self.go_on.wait()
        finally:
            self.making.discard(request.name)
        self.held.add(request.name)
        return kvstore_pb2.PinResponse(lease_id=request.name)

    async def renew_pin(
        self, request: kvstore_pb2.RenewPinRequest, context: Any
    ) -> kvstore_pb2.RenewPinResponse:
        if request.lease_id not in self.held:
            raise errors.NotFound("the lease has ended", field="lease_id")
        return kvstore_pb2.RenewPinResponse()

    async def release_pin(
        self, request: kvstore_pb2.ReleasePinRequest, context: Any
    ) -> kvstore_pb2.ReleasePinResponse:
        self.held.remove(request.lease_id)  # a KeyError is a defect
        return kvstore_pb2.ReleasePinResponse()


class Stream:
    """A reader's end, without gRPC."""

    def __init__(self, streams: PinServer) -> None:
        self._requests: asyncio.Queue[kvstore_pb2.PinsRequest | None] = asyncio.Queue()
        self.frames: AsyncGenerator[kvstore_pb2.PinsResponse, None] = streams.serve(self._incoming())

    async def _incoming(self) -> AsyncIterator[kvstore_pb2.PinsRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    def send(self, *commands: kvstore_pb2.PinCommand, cancels: tuple[int, ...] = ()) -> None:
        self._requests.put_nowait(kvstore_pb2.PinsRequest(commands=commands, cancels=cancels))

    def no_more(self) -> None:
        self._requests.put_nowait(None)

    async def answers(self, n: int) -> dict[int, kvstore_pb2.PinAnswer]:
        found: dict[int, kvstore_pb2.PinAnswer] = {}
        async with asyncio.timeout(WAIT_S):
            while len(found) < n:
                found.update({answer.handle: answer for answer in (await anext(self.frames)).answers})
        return found


def pin(handle: int, *, waits: bool = False, deadline_ms: int = 0) -> kvstore_pb2.PinCommand:
    request = kvstore_pb2.PinRequest(name=f"lease-{handle}", owner="" if waits else "r")
    return kvstore_pb2.PinCommand(handle=handle, pin=request, deadline_ms=deadline_ms)


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture
def lender() -> Lender:
    return Lender()


@pytest.fixture
def streams(lender: Lender) -> PinServer:
    return PinServer(lender, lender.held.discard)


async def test_each_command_has_its_answer_and_its_own_failure(lender: Lender, streams: PinServer) -> None:
    stream = Stream(streams)
    stream.send(
        pin(1, deadline_ms=5000),
        pin(2),
        kvstore_pb2.PinCommand(handle=3, renew=kvstore_pb2.RenewPinRequest(lease_id="gone")),
        kvstore_pb2.PinCommand(handle=4),
        kvstore_pb2.PinCommand(handle=5, release=kvstore_pb2.ReleasePinRequest(lease_id="gone")),
    )
    found = await stream.answers(5)
    assert found[1].pinned.lease_id == "lease-1" and found[2].pinned.lease_id == "lease-2"
    assert lender.left_s[0] is not None and 0 < lender.left_s[0] <= 5 and lender.left_s[1] is None
    kinds = [type(from_failure(found[handle].failure)) for handle in (3, 4, 5)]
    assert kinds == [errors.NotFound, errors.InvalidArgument, errors.Internal]
    stream.send(
        kvstore_pb2.PinCommand(handle=1, renew=kvstore_pb2.RenewPinRequest(lease_id="lease-1")),
        kvstore_pb2.PinCommand(handle=2, release=kvstore_pb2.ReleasePinRequest(lease_id="lease-2")),
    )
    found = await stream.answers(2)
    assert found[1].HasField("renewed") and found[2].HasField("released")
    assert lender.held == {"lease-1"}
    stream.no_more()
    with pytest.raises(StopAsyncIteration):
        await anext(stream.frames)
    assert lender.held == {"lease-1"}  # its answer has left: the lease ends it


async def test_a_quick_pin_overtakes_one_that_waits(lender: Lender, streams: PinServer) -> None:
    stream = Stream(streams)
    stream.send(pin(1, waits=True), pin(2))
    assert set(await stream.answers(1)) == {2}
    lender.go_on.set()
    assert set(await stream.answers(1)) == {1}
    await stream.frames.aclose()


async def test_a_deadline_and_a_cancel_end_one_command(lender: Lender, streams: PinServer) -> None:
    stream = Stream(streams)
    stream.send(pin(1, waits=True, deadline_ms=1), pin(2, waits=True), pin(3, waits=True))
    found = await stream.answers(1)
    assert isinstance(from_failure(found[1].failure), errors.DeadlineExceeded)
    stream.send(cancels=(2, 99))
    waiting = asyncio.create_task(stream.answers(1))
    await until(lambda: lender.making == {"lease-3"})
    lender.go_on.set()
    assert set(await waiting) == {3}
    assert lender.held == {"lease-3"}
    await stream.frames.aclose()


async def test_more_than_the_bound_and_a_handle_twice_are_refused(lender: Lender, streams: PinServer) -> None:
    stream = Stream(streams)
    stream.send(*(pin(handle, waits=True) for handle in range(MAX_COMMANDS)), pin(0), pin(999))
    found = await stream.answers(2)
    assert isinstance(from_failure(found[0].failure), errors.FailedPrecondition)
    assert isinstance(from_failure(found[999].failure), errors.Overloaded)
    lender.go_on.set()
    assert len(await stream.answers(MAX_COMMANDS)) == MAX_COMMANDS
    stream.send(pin(1))
    assert (await stream.answers(1))[1].pinned.lease_id
    await stream.frames.aclose()


async def test_a_stream_whose_answers_are_not_taken_is_read_no_further(
    lender: Lender, streams: PinServer
) -> None:
    """Refusals wait to be taken, too; all of them come in the end, and the stream goes on."""
    stream, sent = Stream(streams), 20 * MAX_COMMANDS
    stream.send(*(pin(handle, waits=True) for handle in range(sent // 2)))
    stream.send(*(pin(handle, waits=True) for handle in range(sent // 2, sent)))
    refused: set[int] = set()
    async with asyncio.timeout(WAIT_S):
        while len(refused) < sent - MAX_COMMANDS:
            frame = await anext(stream.frames)
            assert len(frame.answers) <= 2 * MAX_COMMANDS
            refused |= {answer.handle for answer in frame.answers}
    assert refused == set(range(MAX_COMMANDS, sent))
    lender.go_on.set()
    assert set(await stream.answers(MAX_COMMANDS)) == set(range(MAX_COMMANDS))
    await stream.frames.aclose()


async def test_the_end_of_a_stream_ends_pins_whose_answer_was_not_sent(
    lender: Lender, streams: PinServer
) -> None:
    """The first answer was taken, the second one is leaving, the third one waits, the fourth is made."""
    stream = Stream(streams)
    stream.send(pin(1))
    await stream.answers(1)
    stream.send(pin(2))
    await stream.answers(1)
    stream.send(pin(3), pin(4, waits=True))
    await until(lambda: lender.held == {"lease-1", "lease-2", "lease-3"} and lender.making == {"lease-4"})
    await stream.frames.aclose()
    await until(lambda: not lender.making)
    assert lender.held == {"lease-1"}


async def test_a_lender_that_closes_ends_its_streams_when_all_is_answered(
    lender: Lender, streams: PinServer
) -> None:
    one, idle = Stream(streams), Stream(streams)
    one.send(pin(1, waits=True))
    waiting, ending = asyncio.create_task(one.answers(1)), asyncio.ensure_future(anext(idle.frames, None))
    await until(lambda: lender.making == {"lease-1"})
    streams.close()
    async with asyncio.timeout(WAIT_S):
        assert await ending is None
    lender.go_on.set()
    assert set(await waiting) == {1}
    assert await anext(one.frames, None) is None
    assert await anext(Stream(streams).frames, None) is None
    assert lender.held == {"lease-1"}


async def test_a_lender_that_closes_begins_nothing_more(lender: Lender, streams: PinServer) -> None:
    """Or a reader that always asks would hold its stream, and it would lend what is about to go."""
    stream = Stream(streams)
    stream.send(pin(1, waits=True), pin(2, waits=True))
    waiting = asyncio.create_task(stream.answers(1))
    await until(lambda: lender.making == {"lease-1", "lease-2"})
    streams.close()
    stream.send(pin(3), cancels=(2,))
    await until(lambda: lender.making == {"lease-1"})  # the stream is still read: cancels count
    lender.go_on.set()
    assert set(await waiting) == {1}
    assert await anext(stream.frames, None) is None
    assert lender.held == {"lease-1"}

"""The reader's side of pins: one stream over real gRPC for each lender."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

import libs.worker.pins.pin_calls as pin_calls
from libs.common.rpc.pins.server import PinServer
from libs.common.rpc.serve import ServiceHost
from libs.worker.pins.peers import Peers
from libs.worker.pins.pin_calls import PinCalls
from libs.worker.pins.pin_client import MAX_PINS_IN_FLIGHT, PinClient
from libs.worker.pins.pin_lease import ReaderPins
from slipstream import errors
from slipstream.rpc.dial import dial
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc
from tests.support.stubs.partial_servicer import partial_servicer
from tests.worker.nodes import WAIT_S, eventually


class Lender(kvstore_pb2_grpc.KvstoreServiceServicer):
    """Grants any pin; one with an owner waits until it is cancelled."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.waiting: set[str] = set()
        self.renewed: list[str] = []
        self.streams = 0
        self._pin_streams = PinServer(self, self.held.discard)

    async def pin(self, request: Any, context: Any) -> kvstore_pb2.PinResponse:
        if request.owner:
            self.waiting.add(request.name)
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting.discard(request.name)
        self.held.add(request.name)
        return kvstore_pb2.PinResponse(lease_id=request.name, lease_ms=30)

    async def renew_pin(self, request: Any, context: Any) -> kvstore_pb2.RenewPinResponse:
        if request.lease_id not in self.held:
            raise errors.NotFound("the lease has ended", field="lease_id")
        self.renewed.append(request.lease_id)
        return kvstore_pb2.RenewPinResponse()

    async def release_pin(self, request: Any, context: Any) -> kvstore_pb2.ReleasePinResponse:
        self.held.discard(request.lease_id)
        return kvstore_pb2.ReleasePinResponse()

    async def Pins(self, request_iterator: Any, context: Any) -> AsyncIterator[kvstore_pb2.PinsResponse]:
        self.streams += 1
        async with contextlib.aclosing(self._pin_streams.serve(request_iterator)) as frames:
            async for frame in frames:
                yield frame


@contextlib.asynccontextmanager
async def serving(lender: Lender, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    host = ServiceHost(listen)
    kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(lender, host.server)
    await host.start([])
    try:
        yield host.endpoint
    finally:
        await host.stop(grace_s=0)


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    opened = Peers()
    yield opened
    await opened.close()


def named(name: str, *, waits: bool = False) -> kvstore_pb2.PinRequest:
    return kvstore_pb2.PinRequest(name=name, owner="waits" if waits else "")


async def test_pins_renewals_and_releases_share_one_stream(peers: Peers) -> None:
    lender, calls = partial_servicer(Lender), PinCalls(peers)
    async with serving(lender) as endpoint:
        answers = await asyncio.gather(*(calls.pin(endpoint, named(f"p{n}")) for n in range(20)))
        assert {answer.lease_id for answer in answers} == lender.held
        renewal = kvstore_pb2.RenewPinRequest(lease_id="p3", lease_ms=1000)
        await calls.renew(endpoint, renewal, timeout_s=WAIT_S)
        for number in range(20):
            await calls.release(endpoint, f"p{number}")
        assert not lender.held and lender.renewed == ["p3"] and lender.streams == 1
        with pytest.raises(errors.NotFound):
            await calls.renew(endpoint, renewal, timeout_s=WAIT_S)
        await calls.close()


async def test_pins_beyond_the_limit_wait_and_a_release_does_not(peers: Peers) -> None:
    lender, calls = partial_servicer(Lender), PinCalls(peers)
    async with serving(lender) as endpoint:
        await calls.pin(endpoint, named("first"))
        waiting = [
            asyncio.create_task(calls.pin(endpoint, named(f"w{n}", waits=True)))
            for n in range(MAX_PINS_IN_FLIGHT)
        ]
        await eventually(lambda: len(lender.waiting) == MAX_PINS_IN_FLIGHT)
        late = asyncio.create_task(calls.pin(endpoint, named("late")))
        await calls.release(endpoint, "first")
        assert not lender.held and not late.done()
        waiting[0].cancel()
        assert (await late).lease_id == "late"
        for task in waiting:
            task.cancel()
        await eventually(lambda: not lender.waiting)
        assert lender.held == {"late"} and lender.streams == 1
        await calls.close()


async def test_a_stream_that_breaks_fails_its_pins_at_once_and_the_next_one_opens_another(
    peers: Peers,
) -> None:
    calls, lender = PinCalls(peers), partial_servicer(Lender)
    async with serving(lender) as endpoint:
        await calls.pin(endpoint, named("held"))
        pinning = [asyncio.create_task(calls.pin(endpoint, named(f"w{n}", waits=True))) for n in range(3)]
        await eventually(lambda: len(lender.waiting) == 3)
    async with asyncio.timeout(WAIT_S):
        found = await asyncio.gather(*pinning, return_exceptions=True)
    assert [type(each) for each in found] == [errors.Unavailable] * 3
    await eventually(lambda: not lender.waiting)
    assert lender.held == {"held"}
    successor = partial_servicer(Lender)
    async with serving(successor, endpoint):
        async with asyncio.timeout(WAIT_S):
            while not successor.held:
                with contextlib.suppress(errors.Unavailable):
                    await calls.pin(endpoint, named("again"))
        await calls.pin(endpoint, named("on a stream"))
        assert successor.streams == 1
        await calls.close()


async def test_a_retired_stream_opens_no_second_call(peers: Peers) -> None:
    lender = partial_servicer(Lender)
    async with serving(lender) as endpoint:
        channel = dial(endpoint)
        client = PinClient(channel, lender="lender")
        pinning = [
            asyncio.create_task(client.ask(kvstore_pb2.PinCommand(pin=named(f"p{n}")), timeout_s=WAIT_S))
            for n in range(MAX_PINS_IN_FLIGHT)
        ]
        late = asyncio.create_task(
            client.ask(kvstore_pb2.PinCommand(pin=named("late", waits=True)), timeout_s=WAIT_S)
        )
        await asyncio.sleep(0)
        client.retire()
        await asyncio.gather(*pinning)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        await channel.close()
        with pytest.raises(errors.Unavailable):
            await client.ask(kvstore_pb2.PinCommand(pin=named("again")), timeout_s=WAIT_S)
        assert not client.receivers and not client.is_open


async def test_a_time_out_and_a_cancel_end_the_pin_at_the_lender_and_no_other(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, lender = PinCalls(peers), partial_servicer(Lender)
    async with serving(lender) as endpoint:
        other = asyncio.create_task(calls.pin(endpoint, named("other", waits=True)))
        cancelled = asyncio.create_task(calls.pin(endpoint, named("cancelled", waits=True)))
        await eventually(lambda: lender.waiting == {"other", "cancelled"})
        cancelled.cancel()
        await eventually(lambda: lender.waiting == {"other"})
        monkeypatch.setattr(pin_calls, "PIN_TIMEOUT_S", 0.01)
        with pytest.raises(errors.DeadlineExceeded):
            await calls.pin(endpoint, named("late", waits=True))
        await eventually(lambda: lender.waiting == {"other"})
        assert not other.done() and lender.streams == 1
        await calls.close()
        with pytest.raises(errors.Unavailable):
            await other
        await eventually(lambda: not lender.waiting)


async def test_a_pin_is_renewed_while_it_is_read_and_then_released(peers: Peers) -> None:
    pins, lender = ReaderPins(peers), partial_servicer(Lender)
    async with serving(lender) as endpoint:
        pin = pins.begin(endpoint, named("mine"))
        await pin.answer
        with pin.renewed():
            await eventually(lambda: lender.renewed.count("mine") >= 2)
        assert pins.held == 1
        pin.release()
        await eventually(lambda: not lender.held and not pins.held)
        unanswered = pins.begin(endpoint, named("late", waits=True))
        await eventually(lambda: lender.waiting == {"late"})
        unanswered.release()
        await eventually(lambda: not lender.waiting and not pins.held)
        await pins.close()


async def test_commands_that_were_not_written_are_withdrawn_with_their_caller(peers: Peers) -> None:
    """The peer accepts connections and never answers, so that the first message is never written."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stream = PinClient(peers.channel(f"127.0.0.1:{silent.getsockname()[1]}"), lender="silent")
        for number in range(20):
            with pytest.raises(errors.DeadlineExceeded):
                await stream.ask(kvstore_pb2.PinCommand(pin=named(f"p{number}")), timeout_s=0.001)
        assert stream.waiting_commands <= 1  # the cancel of the one that was taken to be written
        await stream.close()


async def test_a_close_sends_the_releases_under_way_and_opens_nothing_after(peers: Peers) -> None:
    pins, lender = ReaderPins(peers), partial_servicer(Lender)
    async with serving(lender) as endpoint:
        pin = pins.begin(endpoint, named("mine"))
        await pin.answer
        pin.release()
        async with asyncio.timeout(WAIT_S):
            await pins.close()
        assert not pins.held
        late = pins.begin(endpoint, named("late"))
        with pytest.raises(errors.Unavailable):
            await late.answer
        late.release()
        await eventually(lambda: not pins.held)
        assert not lender.held and lender.streams == 1 and not pins._calls._streams

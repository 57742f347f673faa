"""Pins end with the next pin of the same lender, or are their reader's to end."""

from __future__ import annotations

import asyncio

import pytest

import libs.worker.pins.pin_releases as pin_releases
from libs.common.rpc.pins.names import MAX_RELEASED
from libs.worker.pins.pin_releases import PinReleases, on_pin_ended
from slipstream.v1 import kvstore_pb2


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin waits for as long as the test needs."""
    monkeypatch.setattr(pin_releases, "WAIT_FOR_PIN_S", 60.0)


async def waiting(releases: PinReleases, endpoint: str, *lease_ids: str) -> list[asyncio.Task[bool]]:
    offered = [(lease_id, releases.offer(endpoint, lease_id)) for lease_id in lease_ids]
    return [asyncio.create_task(releases.was_carried(endpoint, *each)) for each in offered]


def over(*, answered: bool) -> asyncio.Future[kvstore_pb2.PinResponse]:
    pin: asyncio.Future[kvstore_pb2.PinResponse] = asyncio.get_running_loop().create_future()
    if answered:
        pin.set_result(kvstore_pb2.PinResponse(ended_pins=MAX_RELEASED))
    else:
        pin.set_exception(RuntimeError("the lender is gone"))
    return pin


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("answered", [True, False])
async def test_pins_ride_with_the_next_one_of_their_lender(answered: bool) -> None:
    releases = PinReleases()
    one, two, other = await waiting(releases, "a:1", "one", "two") + await waiting(releases, "b:1", "other")
    request = kvstore_pb2.PinRequest()
    carried = releases.add_to("a:1", request)
    assert list(request.released) == ["one", "two"]
    assert not releases.add_to("a:1", kvstore_pb2.PinRequest())  # no release is carried twice
    on_pin_ended(carried, over(answered=answered))
    async with asyncio.timeout(30):
        assert (await one, await two) == (answered, answered)
    assert not other.done()
    on_pin_ended(releases.add_to("b:1", kvstore_pb2.PinRequest()), over(answered=True))
    assert await other
    assert not releases._waiting


@pytest.mark.usefixtures("patient")
async def test_one_pin_carries_a_bounded_number_of_releases_and_a_cancelled_one_none() -> None:
    releases = PinReleases()
    names = [f"lease-{number}" for number in range(MAX_RELEASED + 1)]
    tasks = await waiting(releases, "a:1", *names)
    request = kvstore_pb2.PinRequest()
    carried = releases.add_to("a:1", request)
    assert list(request.released) == names[:-1]
    pin: asyncio.Future[kvstore_pb2.PinResponse] = asyncio.get_running_loop().create_future()
    pin.cancel()
    on_pin_ended(carried, pin)
    async with asyncio.timeout(30):
        assert [await task for task in tasks[:-1]] == [False] * MAX_RELEASED
    tasks[-1].cancel()
    await asyncio.wait(tasks, timeout=30)
    assert not releases._waiting


@pytest.mark.usefixtures("patient")
async def test_pins_that_the_answer_does_not_name_are_the_readers_to_end() -> None:
    releases = PinReleases()
    tasks = await waiting(releases, "a:1", "one", "two")
    pin: asyncio.Future[kvstore_pb2.PinResponse] = asyncio.get_running_loop().create_future()
    pin.set_result(kvstore_pb2.PinResponse(ended_pins=1))  # a node of before this field names none
    on_pin_ended(releases.add_to("a:1", kvstore_pb2.PinRequest()), pin)
    async with asyncio.timeout(30):
        assert [await task for task in tasks] == [True, False]


async def test_where_no_pin_follows_or_its_answer_is_lost_the_reader_releases_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    releases = PinReleases()
    async with asyncio.timeout(30):
        assert not await releases.was_carried("a:1", "one", releases.offer("a:1", "one"))
    monkeypatch.setattr(pin_releases, "WAIT_FOR_ANSWER_S", 0.01)
    (task,) = await waiting(releases, "a:1", "two")
    assert releases.add_to("a:1", kvstore_pb2.PinRequest())
    async with asyncio.timeout(30):
        assert not await task
    assert not releases._waiting

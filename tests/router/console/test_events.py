"""Live events: made only while someone reads, bounded for each reader, and of no harm to the others."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

from libs.common.service_bounds import CONSOLE_READERS
from services.router.console.events import (
    MAX_QUEUED_BYTES,
    MAX_QUEUED_EVENTS,
    EventHub,
    EventReader,
    sse_event,
)
from slipstream.errors import Overloaded
from tests.router.conftest import eventually


class FakeSource:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.changed: list[dict[str, Any]] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def end(self) -> None:
        self.calls.append("end")

    async def fleet(self) -> dict[str, Any]:
        self.calls.append("fleet")
        return {"workers": []}

    def rates(self) -> dict[str, Any]:
        self.calls.append("rates")
        return {}

    async def jobs(self) -> dict[str, Any]:
        self.calls.append("jobs")
        return {}

    def changed_requests(self, limit: int) -> list[dict[str, Any]]:
        self.calls.append("requests")
        changed, self.changed = self.changed[-limit:], []
        return changed


def nothing() -> None:
    """No connection to abort."""


async def test_nothing_is_made_before_the_first_reader_and_after_the_last() -> None:
    source = FakeSource()
    hub = EventHub(source, fleet_every_s=0.001, lists_per_s=1000)
    assert source.calls == []
    async with hub.reading(nothing) as reader, hub.reading(nothing):
        assert b"event: fleet\n" in await asyncio.wait_for(reader.next(), 30)
    assert (source.calls[0], source.calls[-1], source.calls.count("end")) == ("begin", "end", 1)
    made = len(source.calls)
    for _ in range(10):
        await asyncio.sleep(0.001)
    assert len(source.calls) == made and hub.readers == 0


async def test_a_list_of_requests_that_fails_once_comes_the_next_time() -> None:
    class FailingSource(FakeSource):
        def changed_requests(self, limit: int) -> list[dict[str, Any]]:
            if "failed" not in self.calls:
                self.calls.append("failed")
                raise RuntimeError("once")
            return [{"id": "r"}]

    hub = EventHub(FailingSource(), lists_per_s=1000)
    async with hub.reading(nothing) as reader, asyncio.timeout(30):
        while b"event: request\n" not in await reader.next():
            pass


async def test_a_reader_that_does_not_read_is_dropped_and_the_others_read_on() -> None:
    source = FakeSource()
    hub = EventHub(source, fleet_every_s=0.0005, lists_per_s=1000)
    aborted: list[str] = []
    n_seen = 0
    async with hub.reading(lambda: aborted.append("slow")) as slow, hub.reading(nothing) as quick:
        async with asyncio.timeout(30):
            while not slow.is_dropped:
                n_seen += (await quick.next()).count(b"\n\n")
        assert aborted == ["slow"] and n_seen >= MAX_QUEUED_EVENTS
        assert await slow.next() == b"" and not quick.is_dropped
        assert await asyncio.wait_for(quick.next(), 30)


def test_a_queue_is_bounded_in_events_and_in_bytes() -> None:
    async def check() -> None:
        reader = EventReader(nothing)
        reader.put(b"x" * (MAX_QUEUED_BYTES - 1))
        assert not reader.is_dropped
        reader.put(b"xx")
        assert reader.is_dropped
        other = EventReader(nothing)
        for _ in range(MAX_QUEUED_EVENTS):
            other.put(b"x")
        assert await other.next() == b"x" * MAX_QUEUED_EVENTS and not other.is_dropped

    asyncio.run(check())


async def test_readers_are_bounded_in_number() -> None:
    hub = EventHub(FakeSource())
    async with AsyncExitStack() as stack:
        for _ in range(CONSOLE_READERS):
            await stack.enter_async_context(hub.reading(nothing))
        with pytest.raises(Overloaded):
            await stack.enter_async_context(hub.reading(nothing))
    assert hub.readers == 0
    await hub.close()


async def test_closing_drops_every_reader() -> None:
    hub = EventHub(FakeSource())
    ended: list[bytes] = []

    async def read() -> None:
        async with hub.reading(nothing) as reader:
            while await reader.next():
                pass
            ended.append(b"")

    tasks = [asyncio.create_task(read()) for _ in range(3)]
    await eventually(lambda: hub.readers == 3)
    await hub.close()
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert len(ended) == 3


def test_no_text_of_a_request_can_begin_another_event() -> None:
    event = sse_event("request", [{"session": "a\n\nevent: fleet\ndata: {}\n\n\r\u2028"}])
    assert event.count(b"\n") == 3 and event.endswith(b"\n\n") and b"\r" not in event
    (line,) = [line for line in event.split(b"\n") if line.startswith(b"data: ")]
    assert json.loads(line[6:]) == [{"session": "a\n\nevent: fleet\ndata: {}\n\n\r\u2028"}]

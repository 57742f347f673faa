"""The writes of a call: one timer for many, and an end of those that stay unread."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from services.router.api.rpc.write_watch import WriteWatch
from slipstream import errors
from tests.router.conftest import WAIT_S, eventually

STALL_S, RESET_S = 0.2, 0.05


class Client:
    """The client of a call. It reads at once while `reads` is set."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self.received: list[bytes] = []
        self.is_gone = False

    async def write(self, response: bytes) -> None:
        """As a context's."""
        await self.reads.wait()
        if self.is_gone:
            raise grpc.aio.UsageError("the call is over")
        self.received.append(response)


class Run:
    """A request."""

    def __init__(self) -> None:
        self.ended_by: errors.SlipstreamError | None = None
        self.is_stopped = False

    def end(self, error: errors.SlipstreamError | None = None) -> None:
        """As a running request's."""
        self.ended_by, self.is_stopped = error, True


def watch_of(client: Client, run: Run) -> WriteWatch:
    context: Any = client
    return WriteWatch(context, run, stall_s=STALL_S, reset_s=RESET_S)


def timers() -> int:
    loop: Any = asyncio.get_running_loop()
    return sum(not timer.cancelled() for timer in loop._scheduled)


async def test_one_timer_serves_all_writes_of_a_call() -> None:
    client, run = Client(), Run()
    before, watch = timers(), watch_of(client, run)
    for number in range(5):
        await watch.write(b"%d" % number)
        assert timers() == before + 1
    watch.cancel()
    assert timers() == before and client.received == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_later_write_that_stays_unread_ends_the_request_and_then_the_call() -> None:
    client, run = Client(), Run()

    async def handle() -> None:
        watch = watch_of(client, run)
        try:
            await watch.write(b"first")
            client.reads.clear()
            await watch.write(b"second")
        finally:
            watch.cancel()

    handler = asyncio.create_task(handle())
    await eventually(lambda: run.is_stopped)
    assert isinstance(run.ended_by, errors.Aborted) and client.received == [b"first"]
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(handler, WAIT_S)


async def test_the_call_of_a_stopped_request_is_reset_before_it_stalls() -> None:
    client, run = Client(), Run()
    client.reads.clear()
    context: Any = client

    async def handle() -> None:
        watch = WriteWatch(context, run, stall_s=10 * WAIT_S, reset_s=RESET_S)
        await watch.write(b"unread")

    handler = asyncio.create_task(handle())
    await asyncio.sleep(0)
    run.is_stopped = True
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(handler, WAIT_S)
    assert run.ended_by is None


async def test_the_end_of_a_call_is_a_cancel() -> None:
    client = Client()
    client.is_gone = True
    watch = watch_of(client, Run())
    with pytest.raises(asyncio.CancelledError):
        await watch.write(b"late")
    watch.cancel()

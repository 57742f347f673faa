"""ReadSupervisor waits for late bytes or quarantines their destination."""

from __future__ import annotations

import asyncio

import pytest

from libs.common.transport.base import ReadOp, RegionTable, TransferRefused, TransferTimeout
from libs.common.transport.reads import ReadSupervisor
from libs.common.transport.registered_memory import PageAlignedMemory


class StubbornTransfer:
    """A transfer that ignores its stop event and ends only when released."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.started = False
        self.saw_stop = False

    async def __call__(self, stop: asyncio.Event) -> None:
        self.started = True
        await self.release.wait()
        self.saw_stop = stop.is_set()


async def until_idle(reads: ReadSupervisor) -> None:
    async with asyncio.timeout(60):
        while reads.in_flight:
            await asyncio.sleep(0)


async def test_a_transfer_that_does_not_stop_keeps_its_destination_quarantined_until_it_ends() -> None:
    memory, regions = PageAlignedMemory(8192), RegionTable()
    regions.add(memory.buffer)
    reads, transfer, slots = ReadSupervisor(stop_timeout_s=0.02), StubbornTransfer(), asyncio.Semaphore(1)
    op = ReadOp(memory.address, 1, 4096)
    with pytest.raises(TransferTimeout) as caught:
        await reads.run(transfer, [op], slots=slots, timeout_s=0.01)
    assert not caught.value.quiet
    assert reads.in_flight == 1
    assert reads.quarantined(memory.address + 4095, 10)
    assert not reads.quarantined(memory.address + 4096, 10)
    with pytest.raises(TransferRefused, match="quarantined"):
        reads.check_destinations([ReadOp(memory.address + 100, 1, 1)], regions)
    reads.check_destinations([ReadOp(memory.address + 4096, 1, 1)], regions)
    with pytest.raises(TransferTimeout, match="other reads"):  # the peer's slot stays occupied as well
        await reads.run(transfer, [op], slots=slots, timeout_s=0.01)
    transfer.release.set()
    await until_idle(reads)
    assert transfer.saw_stop
    assert not reads.quarantined(memory.address, 8192)
    assert not slots.locked()


async def test_a_cancel_waits_for_late_bytes_through_any_number_of_cancels() -> None:
    reads, transfer = ReadSupervisor(stop_timeout_s=10), StubbornTransfer()
    run = asyncio.create_task(
        reads.run(transfer, [ReadOp(1, 1, 1)], slots=asyncio.Semaphore(1), timeout_s=10)
    )
    async with asyncio.timeout(60):
        while not transfer.started:
            await asyncio.sleep(0)
    for cancels in range(1, 6):
        run.cancel()
        assert run.cancelling() == cancels
        for _ in range(10):  # each cancel arrives before the next one is sent
            await asyncio.sleep(0)
        assert not run.done()
    transfer.release.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert transfer.saw_stop
    assert reads.in_flight == 0


async def test_a_cancel_at_the_same_time_as_the_end_of_the_transfer_is_a_cancel() -> None:
    reads = ReadSupervisor(stop_timeout_s=10)

    async def cancels_its_reader_as_it_ends(stop: asyncio.Event) -> None:
        transfer = asyncio.current_task()
        assert transfer is not None
        transfer.add_done_callback(lambda _: run.cancel())

    run = asyncio.create_task(
        reads.run(cancels_its_reader_as_it_ends, [ReadOp(1, 1, 1)], slots=asyncio.Semaphore(1), timeout_s=60)
    )
    with pytest.raises(asyncio.CancelledError):
        await run
    assert reads.in_flight == 0


async def test_a_read_cancelled_while_waiting_for_a_slot_takes_none() -> None:
    reads, slots = ReadSupervisor(stop_timeout_s=1), asyncio.Semaphore(1)
    await slots.acquire()
    run = asyncio.create_task(reads.run(StubbornTransfer(), [ReadOp(1, 1, 1)], slots=slots, timeout_s=10))
    await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    slots.release()
    assert reads.in_flight == 0
    async with asyncio.timeout(60):
        await slots.acquire()


async def test_an_error_of_the_transfer_is_the_error_of_the_read() -> None:
    async def fail(stop: asyncio.Event) -> None:
        raise TransferRefused("no")

    reads, slots = ReadSupervisor(stop_timeout_s=1), asyncio.Semaphore(1)
    with pytest.raises(TransferRefused, match="no"):
        await reads.run(fail, [ReadOp(1, 1, 1)], slots=slots, timeout_s=1)
    assert reads.in_flight == 0
    assert not slots.locked()

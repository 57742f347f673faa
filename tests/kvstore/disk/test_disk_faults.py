"""A failing disk makes only its blocks unavailable, never the service or another disk."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from libs.common.checksum import checksum, memory_at
from libs.common.telemetry.counters import Counters
from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.core.metrics import tier_metrics
from services.kvstore.core.store import BlockStore
from services.kvstore.disk.config import check_disks
from services.kvstore.disk.health import FULL_PROBE_S, DiskHealth, DiskState
from services.kvstore.disk.set import DiskSet
from services.kvstore.disk.tier import DiskTier
from services.kvstore.dram.tier import DramTier
from slipstream.errors import FailedPrecondition, InvalidArgument
from tests.kvstore.disk.memory_disk import MemoryDisk
from tests.kvstore.disk.table_check import check_table

BLOCK_BYTES = 2 * PAGE_BYTES - 64
DISK_BYTES = 2 << 20


def key(number: int) -> bytes:
    return checksum(b"key %d" % number)


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


class Gate:
    """Blocks calls of one kind while it is closed, without failing them."""

    def __init__(self, *calls: str) -> None:
        self.calls = calls
        self.open = threading.Event()
        self.open.set()
        self.waiting = 0

    def __call__(self, call: str) -> None:
        if call in self.calls and not self.open.is_set():
            self.waiting += 1
            self.open.wait(60)
            self.waiting -= 1


class Rig:
    """A store over disks in memory."""

    def __init__(self, disks: Sequence[MemoryDisk], *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.disks = disks
        self.tiers = [
            DiskTier(
                Path(f"/memory-{n}"),
                disk_bytes=DISK_BYTES,
                io=disk,
                health=DiskHealth(first_probe_s=0.05),
                clock_s=clock_s,
            )
            for n, disk in enumerate(self.disks)
        ]
        self.set = DiskSet(self.tiers)
        self.set.open()
        self.dram = DramTier(64 * 2 * PAGE_BYTES)
        self.store = BlockStore(self.dram, self.set, Counters(), now_ms=lambda: 0.0)

    def publish(self, number: int) -> None:
        """Queue the block for a disk, as the end of a put does."""
        slot = self.dram.table.allocate(BLOCK_BYTES)
        assert slot is not None
        data = payload(number)
        memory_at(self.dram.address_of(slot), BLOCK_BYTES)[:] = data
        self.dram.table.publish(key(number), slot, BLOCK_BYTES, checksum(data))
        assert self.store.write_behind is not None
        self.store.write_behind.add(key(number))

    async def put(self, *numbers: int) -> int:
        """Put blocks; return the number of durable ones."""
        for number in numbers:
            self.publish(number)
        return len(await self.store.durable([key(number) for number in numbers], timeout_s=60))

    def drop_memory(self) -> None:
        """Drop the blocks that nothing holds from memory."""
        for found in self.dram.table.keys():  # noqa: SIM118
            block = self.dram.get(found)
            if block is not None and not block.holds:
                self.dram.table.drop(block)

    async def served(self, *numbers: int) -> list[int]:
        """Pin each block alone, from the disks; return those served with every byte verified."""
        self.drop_memory()
        found = []
        for number in numbers:
            pin = await self.store.pin([key(number)], owner="r", requested_ms=0, disk_wait_s=60)
            for pinned in pin.blocks:
                address = self.dram.address_of(pinned.block.slot)
                assert bytes(memory_at(address, BLOCK_BYTES)) == payload(number)
                found.append(number)
            if pin.lease is not None:
                self.store.release_pin(pin.lease.lease_id)
        return found

    async def until(self, *states: DiskState) -> None:
        async with asyncio.timeout(60):
            while [tier.health.state for tier in self.tiers] != list(states):
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Close all and check that nothing leaked."""
        await self.store.close(flush_timeout_s=60)
        assert self.store.leaked_blocks == 0
        assert self.dram.table.n_evictable == self.dram.table.n_blocks
        self.set.close()
        for tier, disk in zip(self.tiers, self.disks, strict=True):
            check_table(tier.table)
            assert tier.table.n_held == 0 and tier.n_writing == 0
            assert disk.n_open == 0 and tier.files.pool.in_use == 0


@pytest.fixture
async def one() -> AsyncIterator[Rig]:
    async for rig in opened(1):
        yield rig


@pytest.fixture
async def two() -> AsyncIterator[Rig]:
    async for rig in opened(2):
        yield rig


async def opened(n_disks: int) -> AsyncIterator[Rig]:
    before = {thread.name for thread in threading.enumerate()}
    rig = Rig([MemoryDisk(record=False) for _ in range(n_disks)])
    rig.store.start()
    yield rig
    await rig.close()
    left = {thread.name for thread in threading.enumerate()} - before
    assert not [name for name in left if name.startswith("kv-")]


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EMFILE, errno.ENOSPC])
async def test_failed_writes_do_not_stop_reads_and_the_disk_recovers(one: Rig, call: str, code: int) -> None:
    assert await one.put(*range(8)) == 8
    one.disks[0].failing[call] = code
    assert await one.put(*range(20, 24)) == 0
    assert one.store.lookup_local([key(n) for n in range(20, 24)]) != []  # memory still has them
    if call == "pwritev":
        assert await one.served(*range(8)) == list(range(8))
    one.disks[0].failing.clear()
    await one.until(DiskState.OK)
    assert await one.put(*range(40, 48)) == 8
    assert await one.served(*range(40, 48)) == list(range(40, 48))


async def test_blocks_of_a_segment_whose_sync_failed_are_written_again_from_memory(one: Rig) -> None:
    assert await one.put(*range(8)) == 8
    one.disks[0].failing["fdatasync"] = errno.EIO
    assert await one.put(9) == 0
    assert not one.set.contains(key(0))
    assert one.tiers[0].read_only
    one.disks[0].failing.clear()
    await one.until(DiskState.OK)
    assert one.store.write_behind is not None
    assert await one.store.write_behind.flush(timeout_s=60)
    assert await one.served(*range(10)) == [*range(8), 9]
    assert one.tiers[0].corrupt_blocks == 0


async def test_a_write_whose_failure_arrives_after_the_disk_is_back_is_repeated(
    one: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = DiskSet.write

    async def report_late(*arguments: Any) -> bool:
        taken = await write(*arguments)
        if not taken:
            await one.until(DiskState.OK)
        return taken

    monkeypatch.setattr(DiskSet, "write", report_late)
    one.disks[0].failing["fdatasync"] = errno.EIO
    assert await one.put(9) == 0
    one.disks[0].failing.clear()
    await one.until(DiskState.OK)
    assert one.store.write_behind is not None
    assert await one.store.write_behind.flush(timeout_s=60)
    assert one.set.contains(key(9))


async def test_a_flush_waits_for_the_writes_of_a_disk_that_is_back(
    one: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, may_write = DiskSet.write, asyncio.Event()

    async def delayed(*arguments: Any) -> bool:
        await may_write.wait()
        return await write(*arguments)

    assert await one.put(*range(8)) == 8
    one.disks[0].failing["fdatasync"] = errno.EIO
    assert await one.put(9) == 0
    write_behind = one.store.write_behind
    assert write_behind is not None
    assert await write_behind.flush(timeout_s=60)  # a flush does not wait for blocks that no disk takes
    assert write_behind.waiting == 9
    monkeypatch.setattr(DiskSet, "write", delayed)
    one.disks[0].failing.clear()
    await one.until(DiskState.OK)
    assert not await write_behind.flush(timeout_s=0)
    may_write.set()
    assert await write_behind.flush(timeout_s=60)
    one.drop_memory()
    assert all(one.set.contains(key(number)) for number in (*range(8), 9))


async def test_single_read_errors_are_misses_and_several_in_a_row_mark_the_disk_unavailable(one: Rig) -> None:
    assert await one.put(*range(8)) == 8
    one.disks[0].failing["preadv"] = errno.EIO
    assert await one.served(0) == []
    assert one.tiers[0].health.state == DiskState.OK
    assert await one.served(1, 2, 3) == []
    assert one.tiers[0].unavailable and one.store.lookup_local([key(4)]) == []
    one.disks[0].failing.clear()
    await one.until(DiskState.OK)
    assert await one.served(4, 5, 6, 7) == [4, 5, 6, 7]
    assert await one.served(0) == []  # dropped after its failed read


async def test_a_hanging_disk_is_unavailable_and_back_when_it_answers(one: Rig) -> None:
    gate = one.disks[0].before = Gate("preadv", "pwritev", "fdatasync")
    assert await one.put(*range(8)) == 8
    one.drop_memory()
    gate.open.clear()
    async with asyncio.timeout(60):
        pin = await one.store.pin([key(n) for n in range(8)], owner="r", requested_ms=0, disk_wait_s=60)
    assert pin.blocks == [] and gate.waiting  # the pin ended while the disk still hangs
    assert one.tiers[0].unavailable
    quarantined = "slipstream_kvstore_quarantined_bytes_nvme"
    assert tier_metrics(one.store)[quarantined] == 8 * 2 * PAGE_BYTES  # the disk may still write there
    assert one.store.lookup_local([key(0)]) == []  # later lookups do not wait
    one.publish(50)
    assert await one.store.durable([key(50)], timeout_s=60) == []
    assert one.store.lookup_local([key(50)]) != []
    gate.open.set()
    await one.until(DiskState.OK)
    assert tier_metrics(one.store)[quarantined] == 0
    assert await one.served(*range(8)) == list(range(8))
    assert await one.put(51) == 1


async def test_a_hanging_sync_makes_the_disk_read_only_until_it_returns(one: Rig) -> None:
    assert await one.put(*range(4)) == 4
    gate = one.disks[0].before = Gate("fdatasync")
    gate.open.clear()
    one.publish(10)
    await one.until(DiskState.READ_ONLY)
    assert await one.served(0, 1) == [0, 1]
    gate.open.set()
    await one.until(DiskState.OK)
    assert await one.store.durable([key(10)], timeout_s=60) == [key(10)]


async def test_one_disk_of_two_fails_and_the_other_takes_over(two: Rig) -> None:
    assert await two.put(*range(20)) == 20
    on_first = [n for n in range(20) if two.tiers[0].contains(key(n))]
    on_second = [n for n in range(20) if two.tiers[1].contains(key(n))]
    assert on_first and on_second and len(on_first) + len(on_second) == 20
    gate = two.disks[0].before = Gate("preadv", "pwritev", "fdatasync", "open")
    two.drop_memory()
    gate.open.clear()
    assert await two.served(on_first[0]) == []
    await two.until(DiskState.UNAVAILABLE, DiskState.OK)
    assert await two.served(*on_second) == on_second
    assert await two.put(*range(100, 120)) == 20
    assert all(two.tiers[1].contains(key(n)) for n in range(100, 120))
    gate.open.set()
    await two.until(DiskState.OK, DiskState.OK)
    assert await two.served(*range(20)) == list(range(20))


async def test_a_full_filesystem_keeps_the_tier_at_its_segments_and_it_grows_when_there_is_room(
    one: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.kvstore.disk.tier.FULL_RETRY_S", 0.05)
    slots = one.tiers[0].table.slab_bytes // (3 * PAGE_BYTES)
    assert await one.put(0) == 1
    one.disks[0].failing["fallocate"] = errno.ENOSPC
    for start in range(1, slots + 40, 20):
        await one.put(*range(start, start + 20))
        one.drop_memory()
    assert list(one.disks[0].files) == ["segment-000000"]
    assert one.tiers[0].health.state == DiskState.OK and one.tiers[0].table.evictions > 0
    one.disks[0].failing.clear()
    async with asyncio.timeout(60):
        number = 1000
        while len(one.disks[0].files) < 2:
            await one.put(number)
            one.drop_memory()
            number += 1
            await asyncio.sleep(0.01)


def test_health_is_the_worst_state_and_probes_back_off() -> None:
    health = DiskHealth(first_probe_s=1.0)

    def state() -> DiskState:
        return health.state

    health.record_read(failed=True, now_s=0)
    health.record_read(failed=False, now_s=0)
    health.record_read(failed=True, now_s=0)
    health.record_read(failed=True, now_s=0)
    assert state() == DiskState.OK
    health.record_write_failure(now_s=0)
    assert state() == DiskState.READ_ONLY
    health.record_read(failed=True, now_s=0)
    assert state() == DiskState.UNAVAILABLE
    health.record_write_failure(now_s=0)
    assert state() == DiskState.UNAVAILABLE
    assert not health.probe_is_due(now_s=0.9) and health.probe_is_due(now_s=1.0)
    waits = []
    now_s = 1.0
    for _ in range(8):
        health.record_probe(succeeded=False, hanging=False, now_s=now_s)
        waits.append(next(w for w in range(1, 99) if health.probe_is_due(now_s=now_s + w)))
        now_s += waits[-1]
    assert waits == [2, 4, 8, 16, 30, 30, 30, 30]
    health.record_probe(succeeded=True, hanging=True, now_s=now_s)
    assert state() == DiskState.UNAVAILABLE
    health.record_probe(succeeded=True, hanging=False, now_s=now_s)
    assert state() == DiskState.OK


def test_a_healthy_disk_without_room_for_a_probe_is_probed_rarely() -> None:
    health = DiskHealth(first_probe_s=1.0)
    assert not health.probe_is_due(now_s=0) and health.probe_is_due(now_s=0, wanted=True)
    for now_s in (0.0, FULL_PROBE_S, 2 * FULL_PROBE_S):
        health.record_probe(succeeded=False, hanging=False, now_s=now_s)
        assert health.state == DiskState.OK
        assert not health.probe_is_due(now_s=now_s + FULL_PROBE_S - 0.1, wanted=True)
        assert health.probe_is_due(now_s=now_s + FULL_PROBE_S, wanted=True)
    health.record_probe(succeeded=True, hanging=False, now_s=60)
    assert health.probe_is_due(now_s=60, wanted=True)  # a further segment may be reclaimed at once


def test_configurations_are_checked_with_clear_messages(tmp_path: Path) -> None:
    assert check_disks([tmp_path / "a"], 8 << 20) == []
    (warning,) = check_disks([tmp_path / "a", tmp_path / "b"], 8 << 20)
    assert "one device and fail together" in warning
    (warning,) = check_disks([tmp_path / "a"], (8 << 20) + 5)
    assert "is rounded to 8388608" in warning
    with pytest.raises(InvalidArgument, match="twice"):
        check_disks([tmp_path / "a", tmp_path / "b" / ".." / "a"], 8 << 20)
    with pytest.raises(FailedPrecondition, match="bytes in all"):
        check_disks([tmp_path / "a"], 1 << 60)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FailedPrecondition, match="not writable"):
        check_disks([tmp_path / "file" / "below"], 8 << 20)

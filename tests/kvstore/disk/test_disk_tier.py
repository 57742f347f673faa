"""The disk tier returns the bytes of each put or a miss, with any damage to the files."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from libs.common.checksum import checksum, memory_at
from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from services.kvstore.disk.queues.queue import OnEnd
from services.kvstore.disk.queues.reads import ReadResult
from services.kvstore.disk.segment_format import Superblock
from services.kvstore.disk.segments.files import BlockRead
from services.kvstore.disk.segments.io import SystemDiskIo
from services.kvstore.disk.table.block import DiskBlock
from services.kvstore.disk.tier import FIRST_BLOCKS, DiskTier
from slipstream.errors import DataCorrupt, FailedPrecondition, NotFound, SlipstreamError, Unavailable
from tests.kvstore.disk.table_check import check_table

DISK_BYTES = 4 << 20
BLOCK_BYTES = 3 * PAGE_BYTES - 100  # not page-rounded on purpose


class Rig:
    """A disk tier with memory for writes and reads."""

    def __init__(
        self, directory: Path, *, disk_bytes: int = DISK_BYTES, io: SystemDiskIo | None = None
    ) -> None:
        self.directory = directory
        self.tier = DiskTier(directory, disk_bytes=disk_bytes, io=io)
        self.tier.open()
        self.memory = PageAlignedMemory(16 * PAGE_BYTES)

    async def put(self, number: int, n_bytes: int = BLOCK_BYTES) -> bool:
        data = payload(number, n_bytes)
        self.memory.view(0, n_bytes)[:] = data
        return await self.tier.write(key(number), self.memory.address, n_bytes, checksum(data))

    async def get(self, number: int) -> bytes:
        address = self.memory.address + 8 * PAGE_BYTES
        (found,) = await self.tier.read_many([(key(number), address)])
        if isinstance(found, Exception):
            raise found
        n_bytes, digest = found
        data = bytes(memory_at(address, n_bytes))
        assert checksum(data) == digest
        return data

    def segments(self) -> list[Path]:
        return sorted(self.directory.glob("segment-*"))


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def payload(number: int, n_bytes: int = BLOCK_BYTES) -> bytes:
    return random.Random(number).randbytes(n_bytes)


async def test_blocks_are_whole_before_and_after_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for number in range(20):
        assert await rig.put(number, BLOCK_BYTES + 13 * number)
    assert not await rig.put(3)  # blocks are immutable: a second put writes nothing
    for number in range(20):
        assert await rig.get(number) == payload(number, BLOCK_BYTES + 13 * number)
    rig.tier.close()
    again = Rig(tmp_path)
    assert again.tier.table.n_blocks == 20
    for number in range(20):
        assert await again.get(number) == payload(number, BLOCK_BYTES + 13 * number)
    with pytest.raises(NotFound):
        await again.get(99)
    again.tier.close()
    again.tier.close()


async def test_a_full_tier_evicts_the_oldest_and_stays_within_its_size(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    capacity = DISK_BYTES // (4 * PAGE_BYTES)
    for number in range(capacity + 40):
        assert await rig.put(number)
    assert rig.tier.table.evictions >= 40
    assert sum(path.stat().st_size for path in rig.segments()) <= DISK_BYTES
    with pytest.raises(NotFound):
        await rig.get(0)
    assert await rig.get(capacity + 39) == payload(capacity + 39)
    rig.tier.close()
    # Blocks found after a restart are whole, even if they were evicted before.
    again = Rig(tmp_path)
    for number in range(capacity + 40):
        if again.tier.contains(key(number)):
            assert await again.get(number) == payload(number)
    assert await again.get(capacity + 39) == payload(capacity + 39)
    again.tier.close()


async def test_one_block_size_takes_over_the_room_of_another(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for number in range(DISK_BYTES // (4 * PAGE_BYTES)):
        await rig.put(number)
    for number in range(1000, 1030):
        assert await rig.put(number, 6 * PAGE_BYTES)
        assert await rig.get(number) == payload(number, 6 * PAGE_BYTES)
    rig.tier.close()
    again = Rig(tmp_path)
    assert await again.get(1029) == payload(1029, 6 * PAGE_BYTES)
    again.tier.close()


async def test_a_block_damaged_under_a_running_tier_is_a_miss_and_counted(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for number in range(3):
        await rig.put(number)
    with rig.segments()[0].open("r+b") as file:
        file.seek(Superblock(0, rig.tier.table.slab_bytes, 3 * PAGE_BYTES).payload_offset(1) + 500)
        file.write(b"\xff\x00")
    outcomes = []
    for number in range(3):
        try:
            assert await rig.get(number) == payload(number)
            outcomes.append("whole")
        except DataCorrupt:
            outcomes.append("corrupt")
    assert sorted(outcomes) == ["corrupt", "whole", "whole"]
    assert rig.tier.corrupt_blocks == 1
    lost = outcomes.index("corrupt")
    rig.tier.close()
    rig = Rig(tmp_path)
    assert not rig.tier.contains(key(lost))  # a restart does not find it either
    assert await rig.put(lost)  # and it can be put again
    assert await rig.get(lost) == payload(lost)
    rig.tier.close()


async def test_read_many_reports_each_block_by_its_position(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    memory = PageAlignedMemory(14 * 3 * PAGE_BYTES)
    for number in range(12):
        await rig.put(number)
    for missing in ({1, 9}, {0, 1, 2, 3}, set(range(4, 12)), set(range(12)), set()):
        wanted = [
            (key(number + 100 * (number in missing)), memory.address + number * 3 * PAGE_BYTES)
            for number in range(12)
        ]
        for n in (0, 1, 4, 5, 12):
            memory.buffer[:] = bytes(memory.n_bytes)
            reported: dict[int, ReadResult] = {}
            results = await rig.tier.read_many(wanted[:n], on_read=reported.__setitem__)
            assert len(results) == n and set(reported) == set(range(n)) - missing
            for number, result in enumerate(results):
                if number in missing:
                    assert isinstance(result, NotFound)
                else:
                    assert result is reported[number] and result == (BLOCK_BYTES, checksum(payload(number)))
                    assert memory.view(number * 3 * PAGE_BYTES, BLOCK_BYTES) == payload(number)
    check_table(rig.tier.table)
    assert rig.tier.table.n_held == 0 and not rig.tier.busy
    rig.tier.close()


@pytest.mark.parametrize("refused", [1, 2])
async def test_read_many_waits_for_started_reads_when_others_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    rig = Rig(tmp_path)
    memory = PageAlignedMemory(12 * 3 * PAGE_BYTES)
    for number in range(12):
        await rig.put(number)
    add, calls = rig.tier._reads.add, 0

    def refusing(items: Sequence[BlockRead], on_end: OnEnd) -> None:
        nonlocal calls
        calls += 1
        if calls == refused:
            raise MemoryError("none")
        add(items, on_end)

    monkeypatch.setattr(rig.tier._reads, "add", refusing)
    results = await rig.tier.read_many([(key(n), memory.address + n * 3 * PAGE_BYTES) for n in range(12)])
    ended = [not isinstance(result, Unavailable) for result in results]
    assert ended == [(n >= FIRST_BLOCKS) == (refused == 1) for n in range(12)]
    for number, whole in enumerate(ended):
        assert not whole or memory.view(number * 3 * PAGE_BYTES, BLOCK_BYTES) == payload(number)
    assert rig.tier.table.n_held == 0 and not rig.tier.busy
    rig.tier.close()


async def test_read_many_waits_for_started_reads_when_a_lookup_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    memory = PageAlignedMemory(6 * 3 * PAGE_BYTES)
    for number in range(6):
        await rig.put(number)
    begun: list[tuple[Sequence[BlockRead], OnEnd]] = []
    monkeypatch.setattr(rig.tier._reads, "add", lambda items, on_end: begun.append((items, on_end)))

    def failing(_: Sequence[bytes]) -> list[DiskBlock | None]:
        raise MemoryError("none")

    monkeypatch.setattr(rig.tier.table, "get_many", failing)
    reading = asyncio.create_task(
        rig.tier.read_many([(key(n), memory.address + n * 3 * PAGE_BYTES) for n in range(6)])
    )
    for at in range(FIRST_BLOCKS):  # the disk may write to the memory until the last read has ended
        for _ in range(5):
            await asyncio.sleep(0)
        assert begun and not reading.done()
        begun[0][1](at, None)
    with pytest.raises(MemoryError):
        await asyncio.wait_for(reading, 30)
    assert rig.tier.table.n_held == 0
    rig.tier.close()


class FailingIo(SystemDiskIo):
    """Fails the named call with an errno until healed."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}

    def _fail(self, call: str) -> None:
        if call in self.failing:
            raise OSError(self.failing[call], f"injected into {call}")

    def fallocate(self, fd: int, n_bytes: int) -> None:
        self._fail("fallocate")
        super().fallocate(fd, n_bytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail("preadv")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail("pwritev")
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._fail("fdatasync")
        super().fdatasync(fd)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EMFILE])
async def test_a_failed_write_makes_the_tier_read_only_and_keeps_it_readable(
    tmp_path: Path, code: int
) -> None:
    io = FailingIo()
    rig = Rig(tmp_path, io=io)
    assert await rig.put(1)
    io.failing["pwritev"] = code
    assert not await rig.put(2)
    assert rig.tier.read_only
    io.failing.clear()
    assert not await rig.put(3)
    assert await rig.get(1) == payload(1)
    check_table(rig.tier.table)
    rig.tier.close()


async def test_a_full_disk_limits_the_tier_to_its_existing_segments(tmp_path: Path) -> None:
    io = FailingIo()
    rig = Rig(tmp_path, io=io)
    assert await rig.put(0)
    io.failing["fallocate"] = errno.ENOSPC
    taken = [number for number in range(1, 120) if await rig.put(number)]
    assert len(rig.segments()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "segment-000000"}  # noqa: ASYNC240
    assert not rig.tier.read_only
    assert len(taken) > 100  # the tier continues by evicting
    assert await rig.get(taken[-1]) == payload(taken[-1])
    check_table(rig.tier.table)
    rig.tier.close()


async def test_a_segment_whose_sync_failed_is_never_trusted_again(tmp_path: Path) -> None:
    io = FailingIo()
    rig = Rig(tmp_path, io=io)
    assert await rig.put(1)
    io.failing["fdatasync"] = errno.EIO
    assert not await rig.put(2)
    io.failing.clear()
    assert rig.tier.read_only
    assert not rig.tier.contains(key(1))
    assert not await rig.put(2)
    rig.tier.close()


async def test_a_failed_read_is_a_miss(tmp_path: Path) -> None:
    io = FailingIo()
    rig = Rig(tmp_path, io=io)
    assert await rig.put(1)
    assert await rig.put(2)
    io.failing["preadv"] = errno.EIO
    with pytest.raises(Unavailable):
        await rig.get(1)
    io.failing.clear()
    with pytest.raises(NotFound):
        await rig.get(1)
    assert await rig.get(2) == payload(2)
    assert rig.tier.io_errors == 1
    rig.tier.close()


def test_a_directory_belongs_to_one_process_and_must_be_writable(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with pytest.raises(FailedPrecondition, match="in use"):
        Rig(tmp_path)
    rig.tier.close()
    (tmp_path / "file").write_text("x")
    with pytest.raises(FailedPrecondition, match="not writable"):
        Rig(tmp_path / "file" / "below")
    Rig(tmp_path).tier.close()


async def test_segments_that_do_not_fit_the_configuration_are_removed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert await rig.put(1)
    rig.tier.close()
    (tmp_path / "segment-000099").write_bytes(b"something else")
    (tmp_path / "segment-000001").write_bytes(b"")  # left by a crash
    smaller = Rig(tmp_path, disk_bytes=DISK_BYTES // 2)
    assert smaller.tier.table.n_blocks == 0
    assert smaller.segments() == []
    assert await smaller.put(1)
    smaller.tier.close()


async def test_a_tier_too_small_for_a_block_takes_none(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk_bytes=64 * PAGE_BYTES)
    assert not await rig.put(1, 15 * PAGE_BYTES)
    with pytest.raises(SlipstreamError):
        await rig.get(1)
    rig.tier.close()

"""Groups of writes by the native writer: an error fails only its block, and nothing leaks."""

from __future__ import annotations

import asyncio
import errno
import gc
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from libs.common.checksum import checksum
from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from services.kvstore.disk.native.reads import NativePool
from services.kvstore.disk.native.writes import NativeWriter
from services.kvstore.disk.queues.queue import Ended
from services.kvstore.disk.queues.writes import MAX_GROUP_BLOCKS
from services.kvstore.disk.segment_format import BlockHeader
from services.kvstore.disk.segments.files import BlockRead, BlockWrite, SegmentFiles
from services.kvstore.disk.segments.segment_file import SyncFailed
from services.kvstore.disk.tier import DiskTier
from services.kvstore.dram.slots import Slot
from slipstream.errors import Unavailable
from tests.kvstore.disk.memory_disk import MemoryDisk
from tests.kvstore.disk.native.native_disk import native_writer
from tests.kvstore.disk.table_check import check_table
from tests.support.processes.open_files import open_files

N_SLOTS = 8
SEGMENT_BYTES = N_SLOTS * 2 * PAGE_BYTES


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(PAGE_BYTES)


class Rig:
    """A disk in memory with segments of N_SLOTS pages, and the native writer."""

    def __init__(self) -> None:
        self.disk = MemoryDisk()
        self.files = SegmentFiles(Path("/memory"), segment_bytes=SEGMENT_BYTES, io=self.disk)
        self.writer = native_writer(self.files, self.disk)
        self.memory = PageAlignedMemory(64 * PAGE_BYTES)

    def block(self, slab: int, index: int) -> BlockWrite:
        number = slab * N_SLOTS + index
        data = payload(number)
        self.memory.view(number * PAGE_BYTES, PAGE_BYTES)[:] = data
        header = BlockHeader(checksum(b"%d" % number), PAGE_BYTES, number + 1, checksum(data))
        return BlockWrite(header, Slot(slab, index, PAGE_BYTES), 0, self.memory.address + number * PAGE_BYTES)

    async def write(self, *places: tuple[int, int]) -> list[Ended]:
        """Write blocks to (segment, slot) in one call; return the result of each."""
        ended: dict[int, Ended] = {}
        self.writer.add([self.block(*place) for place in places], ended.__setitem__)
        async with asyncio.timeout(60):
            while len(ended) < len(places):
                await asyncio.sleep(0.001)
        return [ended[position] for position in range(len(places))]

    def stored(self, slab: int) -> list[int]:
        """Slots of the segment that have a whole header with its payload."""
        file = self.files.file(slab)
        found = []
        for index in range(N_SLOTS):
            header = file.read_header(index)
            data = bytes(
                self.disk.files[file.path.name][file.superblock.payload_offset(index) :][:PAGE_BYTES]
            )
            if header is not None and header == self.block(slab, index).header:
                assert checksum(data) == header.checksum
                found.append(index)
        return found

    def close(self) -> None:
        assert len(self.writer) == 0 and self.writer.running_since_s is None
        self.writer.close(wait=True)
        self.writer.close(wait=True)
        self.files.close()
        assert self.disk.n_open == 0 and self.files.pool.in_use == 0


async def test_a_group_is_written_in_runs_and_headers_follow_a_sync() -> None:
    gc.collect()  # readers of earlier tests close their descriptors when they are collected
    before = open_files()
    rig = Rig()
    places = [(0, 5), (0, 1), (1, 3), (0, 2), (0, 7), (1, 0), (0, 0)]
    assert await rig.write(*places) == [None] * len(places)
    assert rig.stored(0) == [0, 1, 2, 5, 7] and rig.stored(1) == [0, 3]
    log = [op for op in rig.disk.log if op.kind in ("write", "sync")]
    log = log[[op.kind for op in log].index("sync") + 3 :]  # both segments were cut before
    kinds = [("sync" if op.kind == "sync" else len(op.data) // PAGE_BYTES) for op in log]
    assert sorted(kinds[:5], key=str) == [1, 1, 1, 1, 3]
    assert kinds[5:7] == ["sync"] * 2 and kinds[-2:] == ["sync"] * 2
    assert sorted(kinds[7:-2], key=str) == [1, 1, 1, 1, 3]
    assert rig.files.n_syncs == 4
    rig.close()
    assert not open_files() - before


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
async def test_an_error_fails_its_own_blocks_and_a_failed_sync_poisons_the_segment(call: str) -> None:
    rig = Rig()
    assert await rig.write((0, 0), (1, 0)) == [None, None]

    def fail_in_segment_1(what: str) -> None:
        if what == call and len(rig.disk.log) and failing:
            raise OSError(errno.EIO, "injected")

    failing = True
    rig.disk.before = fail_in_segment_1
    ended = await rig.write((1, 1), (1, 2))
    failing = False
    kind = SyncFailed if call == "fdatasync" else OSError
    assert all(isinstance(each, kind) for each in ended)
    assert rig.stored(1) == [0] and rig.stored(0) == [0]
    assert rig.files.file(1).poisoned == (call == "fdatasync")
    later = await rig.write((1, 3), (0, 3))
    assert later[1] is None and rig.stored(0) == [0, 3]
    assert isinstance(later[0], SyncFailed) if call == "fdatasync" else later[0] is None
    rig.close()


async def test_a_segment_that_cannot_be_created_fails_its_own_blocks() -> None:
    rig = Rig()
    assert await rig.write((0, 0)) == [None]
    rig.disk.failing["fallocate"] = errno.ENOSPC
    ended = await rig.write((0, 1), (1, 0), (1, 1))
    assert ended[0] is None
    assert all(isinstance(each, OSError) and each.errno == errno.ENOSPC for each in ended[1:])
    rig.disk.failing.clear()
    assert await rig.write((1, 0), (1, 1)) == [None, None]
    rig.close()


async def test_concurrent_writes_a_cancel_of_waiting_ones_and_writes_after_close() -> None:
    rig = Rig()
    places = [(slab, index) for slab in range(4) for index in range(N_SLOTS)]
    assert await asyncio.gather(*(rig.write(place) for place in places)) == [[None]] * len(places)
    ended: list[Ended] = []
    gone = Unavailable("gone")
    rig.writer.add([rig.block(*place) for place in places * 4], lambda _, error: ended.append(error))
    rig.writer.cancel_waiting(gone)  # the first full group has started
    assert set(ended) == {gone} and len(rig.writer) == 4 * len(places) - len(ended) <= 2 * MAX_GROUP_BLOCKS
    async with asyncio.timeout(60):
        while len(rig.writer):
            await asyncio.sleep(0.001)
    assert set(ended) == {gone, None} and len(ended) == 4 * len(places)
    rig.close()
    found = await rig.write((0, 0), (5, 0))
    assert all(isinstance(each, Unavailable) for each in found)


class BrokenPool:
    """A library without memory."""

    def __init__(self, real: NativePool) -> None:
        self.real = real

    def add(self, parts: bytes, n_parts: int, *, n_unended: int) -> None:
        raise MemoryError("injected")

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


async def test_reads_that_cannot_start_end_as_unavailable_and_hold_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path / "kv", disk_bytes=1 << 20)
    tier.open()
    memory = PageAlignedMemory(4 * PAGE_BYTES)
    keys = [bytes([n]) * 16 for n in range(3)]
    digest = checksum(bytes(100))
    assert isinstance(tier._writes, NativeWriter)
    assert all([await tier.write(key, memory.address, 100, digest) for key in keys])
    wanted: Sequence[tuple[bytes, int]] = [(k, memory.address + n * PAGE_BYTES) for n, k in enumerate(keys)]
    with monkeypatch.context() as patch:
        patch.setattr(tier._reads, "_pool", BrokenPool(tier._reads._pool))  # type: ignore[attr-defined]
        reported: list[int] = []
        found = await tier.read_many(wanted, on_read=lambda position, _: reported.append(position))
        assert all(isinstance(each, Unavailable) for each in found) and reported == [0, 1, 2]
        assert len(tier._reads) == 0 and tier.table.n_held == 0 and not tier.busy
    with monkeypatch.context() as patch:  # a missing segment is a defect and is reported likewise
        patch.setattr(tier.files, "_files", {})
        assert all(isinstance(each, Unavailable) for each in await tier.read_many(wanted))
        assert len(tier._reads) == 0 and tier.table.n_held == 0
    assert await tier.read_many(wanted) == [(100, digest)] * 3
    check_table(tier.table)
    tier.close()
    assert all(isinstance(each, Unavailable) for each in await tier.read_many(wanted))
    block = tier.table.get(keys[0])
    assert block is not None and await tier.drop(block)
    assert not await tier.write(keys[0], memory.address, 100, digest)
    assert tier.table.n_held == 0 and tier.n_writing == 0 and BlockRead(block, 0).slot == block.slot
    check_table(tier.table)

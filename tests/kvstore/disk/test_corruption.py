"""Random damage to segment files: neither a running tier nor a restart serves a damaged block."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from libs.common.checksum import checksum
from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from services.kvstore.disk.health import DiskState
from services.kvstore.disk.scrub import Scrubber
from services.kvstore.disk.segment_format import HEADER_BYTES, Superblock
from services.kvstore.disk.segments.files import BlockRead, SegmentFiles
from services.kvstore.disk.segments.restore import rebuild
from services.kvstore.disk.table.block import DiskBlock
from services.kvstore.disk.table.table import DiskTable
from services.kvstore.disk.tier import DiskTier, segment_bytes_for
from slipstream.errors import DataCorrupt, NotFound
from tests.kvstore.disk.memory_disk import MemoryDisk
from tests.kvstore.disk.table_check import check_table

DAMAGES = 10_000
SOAK_DAMAGES = 1_000_000
DIRECTORY = Path("/memory")
DISK_BYTES = 8 * 9 * PAGE_BYTES
SEGMENT_BYTES = segment_bytes_for(DISK_BYTES)
N_BLOCKS = 24
Files = dict[str, bytearray]


def key(number: int) -> bytes:
    return checksum(b"key %d" % number)


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(PAGE_BYTES - 10 * (number % 3))


class Rig:
    """A tier with N_BLOCKS blocks, its current files and those of some writes before."""

    def __init__(self) -> None:
        self.disk = MemoryDisk()
        self.tier = DiskTier(DIRECTORY, disk_bytes=DISK_BYTES, io=self.disk)
        self.memory = PageAlignedMemory(PAGE_BYTES)
        self.earlier: Files = {}
        self.pristine: Files = {}
        self.blocks: list[DiskBlock] = []

    async def fill(self) -> None:
        self.tier.open()
        for number in range(100, 130):  # overwritten by the real blocks
            await self.put(number)
        self.earlier = {name: bytearray(data) for name, data in self.disk.files.items()}
        for number in range(N_BLOCKS):
            assert await self.put(number)
        self.pristine = {name: bytearray(data) for name, data in self.disk.files.items()}
        found = [self.tier.table.get(key(number)) for number in range(N_BLOCKS)]
        self.blocks = [block for block in found if block is not None]
        assert len(self.blocks) == N_BLOCKS

    async def put(self, number: int) -> bool:
        data = payload(number)
        self.memory.view(0, len(data))[:] = data
        return await self.tier.write(key(number), self.memory.address, len(data), checksum(data))

    def location(self, block: DiskBlock) -> tuple[str, int, int]:
        """The file's name, the header's offset and the payload's offset."""
        superblock = Superblock(block.slot.slab, SEGMENT_BYTES, block.slot.slot_bytes)
        index = block.slot.index
        name = self.tier.files.path(block.slot.slab).name
        return name, superblock.header_offset(index), superblock.payload_offset(index)


def flip(rig: Rig, files: Files, rng: random.Random) -> None:
    name, header_at, payload_at = rig.location(rng.choice(rig.blocks))
    at = rng.choice((header_at + rng.randrange(80), payload_at + rng.randrange(PAGE_BYTES - 20)))
    files[name][at] ^= 1 << rng.randrange(8)


def zero_a_page(rig: Rig, files: Files, rng: random.Random) -> None:
    name, header_at, payload_at = rig.location(rng.choice(rig.blocks))
    at = rng.choice((0, header_at, payload_at, payload_at))
    files[name][at : at + PAGE_BYTES] = bytes(PAGE_BYTES)


def swap(rig: Rig, files: Files, rng: random.Random) -> None:
    """Swap the payloads, the headers or the whole of two blocks."""
    one, other = (rig.location(block) for block in rng.sample(rig.blocks, 2))
    for part in rng.choice(((1,), (2,), (2,), (1, 2))):
        a, b = int(one[part]), int(other[part])
        saved = files[one[0]][a : a + PAGE_BYTES]
        files[one[0]][a : a + PAGE_BYTES] = files[other[0]][b : b + PAGE_BYTES]
        files[other[0]][b : b + PAGE_BYTES] = saved


def stale(rig: Rig, files: Files, rng: random.Random) -> None:
    """Undo a write: the header, the payload or both are as before."""
    name, header_at, payload_at = rig.location(rng.choice(rig.blocks))
    for at in rng.choice(((header_at,), (payload_at,), (header_at, payload_at))):
        files[name][at : at + HEADER_BYTES] = rig.earlier[name][at : at + HEADER_BYTES]


def tear(rig: Rig, files: Files, rng: random.Random) -> None:
    name, _, payload_at = rig.location(rng.choice(rig.blocks))
    cut = rng.randrange(0, PAGE_BYTES, 512)
    files[name][payload_at + cut : payload_at + PAGE_BYTES] = bytes(PAGE_BYTES - cut)


def truncate(rig: Rig, files: Files, rng: random.Random) -> None:
    name = rng.choice(list(files))
    del files[name][rng.randrange(len(files[name])) :]


def garbage(rig: Rig, files: Files, rng: random.Random) -> None:
    name, _, payload_at = rig.location(rng.choice(rig.blocks))
    files[name][payload_at : payload_at + PAGE_BYTES] = rng.randbytes(PAGE_BYTES)


KINDS: list[Callable[[Rig, Files, random.Random], None]] = [
    flip, flip, zero_a_page, swap, stale, tear, truncate, garbage,
]  # fmt: skip


def read_running(rig: Rig, known: dict[bytes, bytes], touched: set[str]) -> int:
    """Read like a running tier, with the index from before the damage; return the number of misses."""
    missed = 0
    for block in rig.blocks:
        if rig.tier.files.path(block.slot.slab).name in touched:
            (error,) = rig.tier.files.load([BlockRead(block, rig.memory.address)])
            if error is None:
                assert bytes(rig.memory.view(0, block.n_bytes)) == known[block.key]
            missed += error is not None
    return missed


def read_after_a_start(files: Files, rig: Rig, known: dict[bytes, bytes], touched: set[str]) -> int:
    """Open the damaged files and read every indexed block in a changed file; count the whole ones.

    Blocks in unchanged files were read at first.
    """
    disk = MemoryDisk(files, record=False)
    table = DiskTable(n_slabs=8, slab_bytes=SEGMENT_BYTES)
    segments = SegmentFiles(DIRECTORY, segment_bytes=SEGMENT_BYTES, io=disk)
    rebuild(table, segments)
    whole, names = 0, [segments.path(slab).name for slab in range(8)]
    for found in table.keys():  # noqa: SIM118
        block = table.get(found)
        assert block is not None
        if names[block.slot.slab] not in touched:
            whole += 1
            continue
        (error,) = segments.load([BlockRead(block, rig.memory.address)])
        if error is None:
            assert bytes(rig.memory.view(0, block.n_bytes)) == known[found]
            whole += 1
    segments.close()
    assert disk.n_open == 0
    return whole


async def damage(n_damages: int, *, seed: int, per_round: int = 5) -> None:
    # A warning per removed file would flood the log.
    logging.getLogger("services.kvstore.disk.segments.files").setLevel(logging.ERROR)
    try:
        await damage_without_logs(n_damages, seed=seed, per_round=per_round)
    finally:
        logging.getLogger("services.kvstore.disk.segments.files").setLevel(logging.NOTSET)


async def damage_without_logs(n_damages: int, *, seed: int, per_round: int) -> None:
    rng = random.Random(seed)
    rig = Rig()
    await rig.fill()
    known = {key(number): payload(number) for number in [*range(N_BLOCKS), *range(100, 130)]}
    untouched = {name: bytearray(data) for name, data in rig.pristine.items()}
    assert read_after_a_start(untouched, rig, known, set(untouched)) >= N_BLOCKS
    missed = lost = 0
    for _ in range(n_damages // per_round):
        files = {name: bytearray(data) for name, data in rig.pristine.items()}
        for _ in range(per_round):
            try:
                rng.choice(KINDS)(rig, files, rng)
            except IndexError:
                continue  # the file was truncated before
        touched = {name for name in files if files[name] != rig.pristine[name]}
        for name in touched:
            rig.disk.files[name][:] = files[name]
        missed += read_running(rig, known, touched)
        for name in touched:
            rig.disk.files[name][:] = rig.pristine[name]
        lost += N_BLOCKS - min(N_BLOCKS, read_after_a_start(files, rig, known, touched))
    assert missed > n_damages // 4 and lost > n_damages // 20  # the damage had an effect
    rig.tier.close()
    assert rig.disk.n_open == 0 and rig.tier.files.pool.in_use == 0


@pytest.mark.timeout(600)
async def test_reads_and_starts_find_all_of_ten_thousand_damages() -> None:
    await damage(DAMAGES, seed=5)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
async def test_a_million_damages() -> None:
    await damage(SOAK_DAMAGES, seed=6)


async def test_a_damaged_block_is_dropped_and_counted_and_can_be_put_again() -> None:
    rig = Rig()
    await rig.fill()
    name, _, payload_at = rig.location(rig.blocks[3])
    rig.disk.files[name][payload_at + 7] ^= 4
    wanted = [(key(3), rig.memory.address)]
    assert isinstance((await rig.tier.read_many(wanted))[0], DataCorrupt)
    assert isinstance((await rig.tier.read_many(wanted))[0], NotFound)
    assert rig.tier.corrupt_blocks == 1
    assert await rig.put(3)
    assert await rig.tier.read_many(wanted) == [(len(payload(3)), checksum(payload(3)))]
    assert bytes(rig.memory.view(0, len(payload(3)))) == payload(3)
    check_table(rig.tier.table)
    rig.tier.close()


async def test_the_scrub_finds_damage_in_unread_blocks() -> None:
    rig = Rig()
    await rig.fill()
    for number, part in ((5, 1), (6, 2)):  # a header and a payload
        location = rig.location(rig.blocks[number])
        rig.disk.files[location[0]][int(location[part]) + 17] ^= 1
    scrubber = Scrubber(rig.tier, bytes_per_s=1 << 30, pause_s=0.01)
    scrubber.start()
    async with asyncio.timeout(60):
        while rig.tier.scrubbed_blocks < N_BLOCKS:
            await asyncio.sleep(0.01)
    await scrubber.close()
    assert rig.tier.corrupt_blocks == 2
    assert rig.tier.scrubbed_blocks >= N_BLOCKS
    held = [number for number in range(N_BLOCKS) if rig.tier.contains(key(number))]
    assert held == [number for number in range(N_BLOCKS) if number not in (5, 6)]
    assert rig.tier.table.n_held == 0
    check_table(rig.tier.table)
    rig.tier.close()
    assert rig.disk.n_open == 0 and rig.tier.files.pool.in_use == 0


async def test_the_scrub_keeps_its_rate_and_pauses_while_the_disk_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    await rig.fill()
    held = [rig.tier.table.at(row) for row in rig.tier.table.rows().tolist()]
    n_bytes = sum(block.n_bytes for block in held if block is not None)
    slept_s: list[float] = []
    plain_sleep = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        slept_s.append(delay_s)
        await plain_sleep(0)

    monkeypatch.setattr("asyncio.sleep", sleep)
    rate_bytes_per_s, pause_s = 1000, 1e9
    scrubber = Scrubber(rig.tier, bytes_per_s=rate_bytes_per_s, pause_s=pause_s)
    rig.tier.watch.close()  # a probe could bring the disk back too early
    rig.tier.health.state = DiskState.UNAVAILABLE
    scrubber.start()
    async with asyncio.timeout(60):
        while len(slept_s) < 10:
            await plain_sleep(0)
        assert set(slept_s) == {pause_s} and not rig.tier.scrubbed_blocks
        rig.tier.health.state = DiskState.OK
        while rig.tier.scrubbed_blocks <= len(held):  # a whole pass and a block of the next
            await plain_sleep(0)
    await scrubber.close()
    between_s = [each for each in slept_s if each != pause_s]
    assert sum(between_s[: len(held)]) == pytest.approx(n_bytes / rate_bytes_per_s)
    scrubbed_blocks = rig.tier.scrubbed_blocks
    none = Scrubber(rig.tier, bytes_per_s=0)
    none.start()
    for _ in range(10):
        await plain_sleep(0)
    await none.close()
    assert rig.tier.scrubbed_blocks == scrubbed_blocks
    rig.tier.close()

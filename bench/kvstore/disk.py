"""Reads and durable puts of the disk tier against the bare disk, both in turn on the same filesystem.

The raw sides know nothing: O_DIRECT `preadv` in four threads of a file that was written before, and
O_DIRECT `pwritev` of groups in four threads with the syncs the tier makes: payloads, fdatasync, one
header page for each block, fdatasync, two groups at a time. Both sides write over what they wrote before, the
oldest first, on as much disk. The tier's sides go through its public
calls on the event loop and verify, write headers, index and evict.

Both sides' memory is of the kind that the kvstore has, on huge pages where the kernel gives them.
`raw_plain_read` reads into ordinary pages, as most programs would, for comparison only.

`read` is a pin of many blocks that lie apart, `read_chain` one of blocks that were written together and lie
together. The tier has as much at the disk as it finds right, and threads that verify. `read_4_pins`
has four callers that ask as a pin of one block does and wait for it: four blocks in flight, with their
checksums.
`put` is on a disk of twice the data, so small that the policy follows all of its blocks; `put_large` on one
of `large_bytes`, as full as disks are.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.common.checksum import checksum
from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from services.kvstore.disk.set import MAX_WRITING_BLOCKS
from services.kvstore.disk.tier import DiskTier

IN_FLIGHT = 4
WRITTEN = MAX_WRITING_BLOCKS  # blocks on their way to a disk at once
SOURCES = 16
READS = ("read", "raw_read", "read_chain", "read_4_pins", "raw_plain_read")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DiskShape:
    """How much is moved for each block size, and how often the sides take turns."""

    data_bytes: int = 96 * MIB
    turns: int = 7
    reads_a_turn: int = 5  # of each kind; short ones, as a virtual disk's speed changes within a second
    large_bytes: int = 2048 * MIB


class TierSide:
    """The disk tier with a chain of blocks, and a disk of so many places."""

    def __init__(self, directory: Path, block_bytes: int, n_blocks: int, n_places: int) -> None:
        self.block_bytes = block_bytes
        self.n_blocks = n_blocks
        overhead = block_bytes + PAGE_BYTES
        self.tier = DiskTier(directory, disk_bytes=max(64 * MIB, n_places * overhead))
        self.tier.open()
        self.memory = PageAlignedMemory(n_blocks * block_bytes)
        self._data = random.Random(1).randbytes(MIB)
        self.memory.buffer[:] = self._data * (self.memory.n_bytes // MIB)
        self.checksums = [checksum(self.memory.view(i * block_bytes, block_bytes)) for i in range(SOURCES)]
        self._n_put = 0

    def fill(self) -> None:
        """The blocks to put."""
        for start in range(0, SOURCES * self.block_bytes, MIB):
            self.memory.view(start, MIB)[:] = self._data

    def key(self, number: int) -> bytes:
        return checksum(b"%d" % number)

    async def put(self) -> float:
        """Put as many new blocks as there are, WRITTEN on their way at a time; bytes a second."""
        numbers = iter(range(self._n_put, self._n_put + self.n_blocks))
        self._n_put += self.n_blocks

        async def putting(lane: int) -> None:
            source = lane % SOURCES
            address = self.memory.address + source * self.block_bytes
            for number in numbers:
                assert await self.tier.write(
                    self.key(number), address, self.block_bytes, self.checksums[source]
                )

        begun = time.perf_counter()
        await asyncio.gather(*(putting(lane) for lane in range(WRITTEN)))
        return self.n_blocks * self.block_bytes / (time.perf_counter() - begun)

    async def read_pin(self, order: Sequence[int]) -> float:
        """Read the last put's blocks in that order, all asked for at once; bytes a second."""
        first = self._n_put - self.n_blocks
        wanted = [
            (self.key(first + number), self.memory.address + lane * self.block_bytes)
            for lane, number in enumerate(order)
        ]
        begun = time.perf_counter()
        found = await self.tier.read_many(wanted)
        elapsed_s = time.perf_counter() - begun
        assert not any(isinstance(each, Exception) for each in found)
        return len(order) * self.block_bytes / elapsed_s

    async def read_single_pins(self, order: Sequence[int]) -> float:
        """Read them with IN_FLIGHT callers, each of which pins one block at a time; bytes a second."""
        first = self._n_put - self.n_blocks
        places = enumerate(order)  # each has its own, as in the node's memory and on the raw side

        async def reading() -> None:
            for place, number in places:
                address = self.memory.address + place * self.block_bytes
                (found,) = await self.tier.read_many([(self.key(first + number), address)])
                assert not isinstance(found, Exception)

        begun = time.perf_counter()
        await asyncio.gather(*(reading() for _ in range(IN_FLIGHT)))
        return len(order) * self.block_bytes / (time.perf_counter() - begun)


class RawSide:
    """A preallocated file of so many places and four threads."""

    def __init__(self, path: Path, block_bytes: int, n_blocks: int, n_places: int) -> None:
        self.block_bytes, self.n_blocks = block_bytes, n_blocks
        self.fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
        self.n_places = n_places
        self._first = 0  # where the last put began
        self.payloads_at = n_places * PAGE_BYTES
        os.posix_fallocate(self.fd, 0, self.payloads_at + n_places * block_bytes)
        self.memory = PageAlignedMemory(n_blocks * block_bytes)
        self.memory.buffer[:] = random.Random(2).randbytes(MIB) * (self.memory.n_bytes // MIB)
        self.plain = mmap.mmap(-1, self.memory.n_bytes)
        self.plain[:] = bytes(self.memory.n_bytes)
        self.threads = ThreadPoolExecutor(IN_FLIGHT)
        self.drivers = ThreadPoolExecutor(2)

    def close(self) -> None:
        self.drivers.shutdown()
        self.threads.shutdown()
        os.close(self.fd)

    def _payload_at(self, number: int) -> int:
        """Where the block of the last put is."""
        return self.payloads_at + (self._first + number) * self.block_bytes

    def read(self, order: Sequence[int], *, plain: bool = False) -> float:
        """`preadv` of the blocks in that order, four at a time; bytes a second."""
        places = enumerate(order)
        memory, size = memoryview(self.plain if plain else self.memory.buffer), self.block_bytes

        def reading(lane: int) -> None:
            for place, number in places:
                os.preadv(self.fd, [memory[place * size : (place + 1) * size]], self._payload_at(number))

        begun = time.perf_counter()
        list(self.threads.map(reading, range(IN_FLIGHT)))
        return len(order) * size / (time.perf_counter() - begun)

    def put(self, group_blocks: int) -> float:
        """Write all blocks in groups: payloads, sync, headers, sync; bytes a second."""

        def write(number: int) -> None:
            view = self.memory.view(number % SOURCES * self.block_bytes, self.block_bytes)
            os.pwritev(self.fd, [view], self._payload_at(number))

        def group(first: int) -> None:
            size = min(group_blocks, self.n_blocks - first)
            list(self.threads.map(write, range(first, first + size)))
            os.fdatasync(self.fd)
            pages = self.memory.view(0, size * PAGE_BYTES)
            os.pwritev(self.fd, [pages], (self._first + first) * PAGE_BYTES)
            os.fdatasync(self.fd)

        self._first = self._first + self.n_blocks
        if self._first + self.n_blocks > self.n_places:
            self._first = 0
        begun = time.perf_counter()
        list(self.drivers.map(group, range(0, self.n_blocks, group_blocks)))
        return self.n_blocks * self.block_bytes / (time.perf_counter() - begun)


@contextmanager
def sides(
    directory: Path, block_bytes: int, n_blocks: int, n_places: int
) -> Iterator[tuple[TierSide, RawSide]]:
    """Both sides on one filesystem; their files are removed afterwards."""
    raw_path = directory / "raw"
    raw = RawSide(raw_path, block_bytes, n_blocks, n_places)
    tier = TierSide(directory / "tier", block_bytes, n_blocks, n_places)
    try:
        yield tier, raw
    finally:
        raw.close()
        tier.tier.close()
        raw_path.unlink()
        for path in (directory / "tier").iterdir():
            path.unlink()


Turns = dict[str, list[float]]


async def put_in_turn(tier: TierSide, raw: RawSide, turns: Turns, name: str) -> None:
    """Both sides write as many blocks, with as many syncs; bytes a second and processor time a block."""
    tier.fill()  # reads went there too
    syncs, begun = tier.tier.n_syncs, time.process_time()
    speed = await tier.put()
    took_s = time.process_time() - begun
    groups = max(1, (tier.tier.n_syncs - syncs) // 2)
    begun = time.process_time()
    raw_speed = raw.put(max(1, round(tier.n_blocks / groups)))
    raw_took_s = time.process_time() - begun
    found = {
        name: speed,
        f"raw_{name}": raw_speed,
        f"{name}_group_blocks": tier.n_blocks / groups,
        f"{name}_cpu_us": took_s / tier.n_blocks * 1e6,
        f"raw_{name}_cpu_us": raw_took_s / tier.n_blocks * 1e6,
    }
    for key, value in found.items():
        turns.setdefault(key, []).append(value)


async def fill(tier: TierSide, raw: RawSide) -> None:
    """Every byte of both files is written before anything counts, and the tier evicts."""
    for _ in range(-(-raw.n_places // raw.n_blocks)):
        await tier.put()
        raw.put(SOURCES)
    await tier.put()


async def read_in_turn(tier: TierSide, raw: RawSide, turns: Turns, rng: random.Random) -> None:
    """Every kind of read once, in an order of this turn; bytes a second."""
    order = rng.sample(range(tier.n_blocks), tier.n_blocks)

    async def read(name: str) -> float:
        match name:
            case "read":
                return await tier.read_pin(order)
            case "read_chain":
                return await tier.read_pin(range(tier.n_blocks))
            case "read_4_pins":
                return await tier.read_single_pins(order)
            case _:
                return raw.read(order, plain=name == "raw_plain_read")

    for name in rng.sample(READS, len(READS)):
        turns.setdefault(name, []).append(await read(name))


async def measure_size(directory: Path, block_bytes: int, shape: DiskShape) -> dict[str, Any]:
    """One block size: MB/s of each side and the medians of the ratios within a turn."""
    n_blocks = max(32, shape.data_bytes // block_bytes)
    turns: Turns = {}
    rng = random.Random(block_bytes)
    with sides(directory, block_bytes, n_blocks, 2 * n_blocks) as (tier, raw):
        await fill(tier, raw)
        for _ in range(shape.turns):
            await put_in_turn(tier, raw, turns, "put")
            for _ in range(shape.reads_a_turn):
                await read_in_turn(tier, raw, turns, rng)
    with sides(directory, block_bytes, n_blocks, shape.large_bytes // block_bytes) as (tier, raw):
        await fill(tier, raw)
        policy = tier.tier.table.policy
        for _ in range(shape.turns):
            await put_in_turn(tier, raw, turns, "put_large")
    median = statistics.median
    pairs = (
        ("read", "raw_read"),
        ("read_chain", "raw_read"),
        ("read_4_pins", "raw_read"),
        ("read", "raw_plain_read"),
        ("put", "raw_put"),
        ("put_large", "raw_put_large"),
    )
    ratio = {
        f"{mine}_to_{'raw_plain' if 'plain' in other else 'raw'}": round(
            median(a / b for a, b in zip(turns[mine], turns[other], strict=True)), 3
        )
        for mine, other in pairs
    }
    beside = {name: turns.pop(name) for name in list(turns) if name.endswith(("_group_blocks", "_cpu_us"))}
    return {
        "block_bytes": block_bytes,
        "mb_per_s": {name: round(median(values) / 1e6) for name, values in turns.items()},
        **ratio,
        **{name: round(median(values), 1) for name, values in beside.items()},
        "large_followed_1_in": policy.rate if policy is not None else 0,
    }


async def measure(directory: Path, shape: DiskShape) -> list[dict[str, Any]]:
    """All block sizes."""
    return [await measure_size(directory, size, shape) for size in (256 << 10, MIB, 4 * MIB)]

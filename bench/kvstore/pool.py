"""Remote reads of the KV store against Mooncake Store: its memory, and its disk tier.

    python -m bench.kvstore.pool                 # 1 MiB blocks in batches of 16
    python -m bench.kvstore.pool --json

Both systems run as they would: a master, one process that owns the blocks, this process that reads them.

    kvstore       a worker restores 16 blocks by Mooncake's engine (lookup and pin, transfer, every block
                  verified, release)
    kvstore_socket  the same by our own sockets
    pool          `batch_get_into` of 16 values of the same size into registered memory; nothing is verified.
                  The owner is another process, so its engine sends every byte over TCP, as ours do
    kvstore_disk  the same restore where the store's memory holds two batches of twelve: O_DIRECT reads
    pool_disk     `batch_get_into` where the owner was started again on its directory of buckets, so that
                  disk copies are all there is; it reads through the operating system's cache
    pool_disk_cold  the same with the cache of those files dropped before each batch

The sides take turns; a side's figure is the median of its turns, the ratio the median of the ratios within
a turn. Memory first, then the disks, each with separate processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.command_line import bench_parser
from bench.kvstore.pool_node import CLIENT_TTL_S, PoolShape, open_master, open_node
from bench.kvstore.pool_node import open_store as open_pool
from bench.kvstore.worker import BenchWorker, open_store
from libs.common.checksum import checksum_at
from libs.common.transport.registered_memory import PageAlignedMemory

MIB = 1 << 20
BATCHES = 12


async def _nothing(number: int) -> None:
    """Before a batch that needs no preparation."""


@dataclass(frozen=True, slots=True)
class TimedReader:
    """`read` reads batch n and is timed; `prepare` comes before it and is not."""

    read: Callable[[int], Coroutine[Any, Any, None]]
    prepare: Callable[[int], Coroutine[Any, Any, None]] = _nothing


class PoolReader:
    """A client of Mooncake Store that adds no memory to the pool."""

    def __init__(self, master: str, shape: PoolShape) -> None:
        self._shape = shape
        self.store = open_pool(master, shape)
        self._memory = PageAlignedMemory(shape.batch_bytes)
        assert self.store.register_buffer(self._memory.address, self._memory.n_bytes) == 0
        self._addresses = [self._memory.address + i * shape.block_bytes for i in range(shape.batch_blocks)]
        self._sizes = [shape.block_bytes] * shape.batch_blocks

    async def read(self, number: int) -> None:
        codes = self.store.batch_get_into(self._shape.names(number), self._addresses, self._sizes)
        assert list(codes) == self._sizes, codes

    async def check(self, checksums: Sequence[str]) -> None:
        """Read everything once and compare: first contacts, and proof of what is read."""
        for number in range(self._shape.batches):
            await self.read(number)
            first = number * self._shape.batch_blocks
            for address, size, expected in zip(self._addresses, self._sizes, checksums[first:], strict=False):
                assert checksum_at(address, size).hex() == expected, "the pool gave wrong bytes"


class DiskRestores:
    """Restores that find their blocks on disk, and how many did."""

    def __init__(self, worker: BenchWorker, endpoint: str) -> None:
        self._worker = worker
        self._endpoint = endpoint
        self.blocks = 0
        self.from_disk = 0

    async def read(self, number: int) -> None:
        n_blocks, from_disk = await self._worker.restore(self._endpoint, number)
        self.blocks += n_blocks
        self.from_disk += from_disk

    async def released(self, number: int) -> None:
        """The pin of the batch before holds memory that this one needs."""
        await self._worker.released()


async def timed(side: TimedReader, shape: PoolShape) -> float:
    """GB/s of one turn: every batch once."""
    spent_s = 0.0
    for number in range(shape.batches):
        await side.prepare(number)
        started = time.perf_counter()
        await side.read(number)
        spent_s += time.perf_counter() - started
    return shape.batches * shape.batch_bytes / spent_s / 1e9


async def take_turns(
    sides: dict[str, TimedReader], shape: PoolShape, *, turns: int
) -> dict[str, list[float]]:
    """GB/s of each side and turn, after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        await timed(side, shape)
    for turn in range(turns):
        names = list(sides)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(await timed(sides[name], shape))
    return found


async def measure_memory(shape: PoolShape, *, turns: int) -> dict[str, list[float]]:
    """Our restores from memory, by both transports, against the pool's."""
    with (
        tempfile.TemporaryDirectory() as directory,
        open_master(Path(directory), offload=False) as master,
        open_node(master, shape) as owner,
    ):
        reader = PoolReader(master, shape)
        try:
            await reader.check(owner["checksums"])
            async with AsyncExitStack() as stack:
                sides = {"pool": TimedReader(reader.read)}
                for name, transport in (("kvstore", "mooncake"), ("kvstore_socket", "socket")):
                    parent = Path(directory) / name
                    parent.mkdir()
                    worker, endpoint = await stack.enter_async_context(
                        _worker(parent, shape, transport, dram_bytes=2 * shape.batches * shape.batch_bytes)
                    )
                    sides[name] = TimedReader(partial(_restore, worker, endpoint))
                return await take_turns(sides, shape, turns=turns)
        finally:
            reader.store.close()


async def _restore(worker: BenchWorker, endpoint: str, number: int) -> None:
    await worker.restore(endpoint, number)


async def measure_disk(
    parent: Path | None, shape: PoolShape, *, turns: int, transport: str
) -> tuple[dict[str, list[float]], float]:
    """Our restores from disk against the pool's; and the share of ours that did come from disk."""
    with (
        tempfile.TemporaryDirectory(dir=parent) as directory,
        open_master(Path(directory), offload=True) as master,
        _disk_owner(master, shape, Path(directory) / "pool") as checksums,
    ):
        reader = PoolReader(master, shape)
        try:
            await reader.check(checksums)
            assert not _in_memory(reader.store, shape), "the pool still has copies in memory"
            files = [path for path in (Path(directory) / "pool").rglob("*") if path.is_file()]

            async def drop(number: int) -> None:
                _drop_cache(files)

            async with _worker(
                Path(directory),
                shape,
                transport,
                dram_bytes=2 * shape.batch_bytes,
                disk_bytes=3 * shape.batches * shape.batch_bytes,
            ) as (worker, endpoint):
                ours = DiskRestores(worker, endpoint)
                turned = await take_turns(
                    {
                        "kvstore_disk": TimedReader(ours.read, ours.released),
                        "pool_disk": TimedReader(reader.read),
                        "pool_disk_cold": TimedReader(reader.read, drop),
                    },
                    shape,
                    turns=turns,
                )
            return turned, ours.from_disk / ours.blocks
        finally:
            reader.store.close()


@asynccontextmanager
async def _worker(
    directory: Path, shape: PoolShape, transport: str, *, dram_bytes: int, disk_bytes: int = 0
) -> AsyncIterator[tuple[BenchWorker, str]]:
    """Our store with the batches in it, and a worker that restores them."""
    with open_store(directory, transport=transport, dram_bytes=dram_bytes, disk_bytes=disk_bytes) as store:
        async with BenchWorker.opened(
            transport, page_bytes=shape.block_bytes, n_pages=shape.batch_blocks
        ) as worker:
            await worker.fill(
                store.endpoint, chains=shape.batches, blocks=shape.batch_blocks, durable=disk_bytes > 0
            )
            yield worker, store.endpoint


@contextmanager
def _disk_owner(master: str, shape: PoolShape, directory: Path) -> Iterator[list[str]]:
    """An owner with nothing but copies on disk: the one that wrote them has ended. Their checksums."""
    directory.mkdir()
    with open_node(master, shape, ssd=directory) as owner:
        checksums = owner["checksums"]
    # The master forgets the first owner's copies when its time is up, also under the second one's name.
    time.sleep(2 * CLIENT_TTL_S + 2)
    with open_node(master, shape, ssd=directory, serve=True):
        yield checksums


def _in_memory(store: Any, shape: PoolShape) -> int:
    """How many blocks have a copy in the memory of any node."""
    names = [name for batch in range(shape.batches) for name in shape.names(batch)]
    found = store.batch_get_replica_desc(names)
    return sum(any(each.is_memory_replica() for each in copies) for copies in found.values())


def _drop_cache(files: Sequence[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def summary(turned: dict[str, list[float]], pairs: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Medians, spreads, and the ratio ours to theirs of each pair."""
    return {
        "gb_per_s": {name: round(statistics.median(values), 3) for name, values in turned.items()},
        "spread_gb_per_s": {
            name: [round(min(values), 3), round(max(values), 3)] for name, values in turned.items()
        },
        **{
            name: round(
                statistics.median(a / b for a, b in zip(turned[ours], turned[theirs], strict=True)), 3
            )
            for name, (ours, theirs) in pairs.items()
        },
    }


async def measure(
    directory: Path | None = None,
    *,
    block_bytes: int = MIB,
    batch_blocks: int = 16,
    turns: int = 9,
    transport: str = "mooncake",
) -> dict[str, Any]:
    """Both parts."""
    shape = PoolShape(BATCHES, batch_blocks, block_bytes)
    memory = await measure_memory(shape, turns=turns)
    disk, from_disk = await measure_disk(directory, shape, turns=turns, transport=transport)
    return {
        "block_bytes": block_bytes,
        "batch_blocks": batch_blocks,
        "disk_transport": transport,
        "memory": summary(
            memory,
            {
                "ratio_to_pool": ("kvstore", "pool"),
                "socket_ratio_to_pool": ("kvstore_socket", "pool"),
            },
        ),
        "disk": {
            **summary(
                disk,
                {
                    "ratio_to_pool_disk": ("kvstore_disk", "pool_disk"),
                    "ratio_to_pool_disk_cold": ("kvstore_disk", "pool_disk_cold"),
                },
            ),
            "kvstore_share_from_disk": round(from_disk, 3),
        },
    }


def show(found: dict[str, Any]) -> None:
    """The figures as lines."""
    for part in (found["memory"], found["disk"]):
        for name, speed in part["gb_per_s"].items():
            low, high = part["spread_gb_per_s"][name]
            print(f"{name:15} {speed:6.2f} GB/s   ({low:.2f} to {high:.2f})")
        for name, value in part.items():
            if isinstance(value, float):
                print(f"{name}: {value:.2f}")


def main() -> None:
    """Measure and print."""
    parser = bench_parser("kvstore.pool", __doc__)
    parser.add_argument("--dir", type=Path, help="where to write, on the disk to measure; default: temporary")
    parser.add_argument("--block-bytes", type=int, default=MIB)
    parser.add_argument("--batch-blocks", type=int, default=16)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument(
        "--transport", choices=("mooncake", "socket"), default="mooncake", help="of the restores from disk"
    )
    asked = parser.parse_args()
    found = asyncio.run(
        measure(
            asked.dir,
            block_bytes=asked.block_bytes,
            batch_blocks=asked.batch_blocks,
            turns=asked.turns,
            transport=asked.transport,
        )
    )
    if asked.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()

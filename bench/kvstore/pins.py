"""Pins of blocks on disk that wait for one another: in the kvstore's order, and first come, first served.

    python -m bench.kvstore.pins
    python -m bench.kvstore.pins --dir /mnt/nvme --json

The same promotions of the same blocks in both orders, in turn, in an order of this round. Times are medians
in ms from the moment at which a pin came; ratios are medians of the ratios within a round.

    short_behind_long   a pin of one block that comes right after one of thousands, and that one
    shorts_in_long      pins of one block, one after another while the long one is read, and that one
    four_long           four pins of a quarter as many each, one right after the other
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.command_line import bench_parser
from libs.common.checksum import checksum
from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.disk.set import DiskSet
from services.kvstore.disk.tier import DiskTier
from services.kvstore.dram.tier import DramTier
from services.kvstore.loading.pin_order import PinOrder
from services.kvstore.loading.promotion import Promoter, Promotion

BLOCK_BYTES = 256 << 10
LONG_BLOCKS = 2000
SHORTS = 100  # at most, beside a long one
_WAIT_S = 60.0
SCENES = ("short_behind_long", "shorts_in_long", "four_long")
Times = dict[str, float]
Order = type[PinOrder[Promotion]]


class FirstCome(PinOrder[Promotion]):
    """First come, first served."""

    def _end_of(self, n_blocks: int) -> float:
        return 0.0


def keys(first: int, n_blocks: int) -> list[bytes]:
    """The keys of blocks that were written together."""
    return [checksum(b"%d" % number) for number in range(first, first + n_blocks)]


ORDERS: tuple[Order, Order] = (PinOrder, FirstCome)


class FilledNode:
    """Memory and a disk with all blocks."""

    def __init__(self, directory: Path) -> None:
        n_blocks = LONG_BLOCKS + SHORTS
        self.dram = DramTier(2 * n_blocks * BLOCK_BYTES)
        self.disk = DiskTier(directory, disk_bytes=2 * n_blocks * (BLOCK_BYTES + PAGE_BYTES))
        self.disk.open()
        self.promoter: Promoter

    async def fill(self) -> None:
        """Write them."""
        data = self.dram.memory.view(0, BLOCK_BYTES)
        data[:] = random.Random(1).randbytes(BLOCK_BYTES)
        digest = checksum(data)
        for first in range(0, LONG_BLOCKS + SHORTS, 16):
            wrote = await asyncio.gather(
                *(
                    self.disk.write(key, self.dram.memory.address, BLOCK_BYTES, digest)
                    for key in keys(first, 16)
                )
            )
            assert all(wrote)

    async def pin(self, wanted: Sequence[bytes]) -> float:
        """Load them; milliseconds until all were there."""
        begun = time.perf_counter()
        promotion = self.promoter.promote(wanted)
        await promotion.wait(timeout_s=_WAIT_S)
        took_ms = (time.perf_counter() - begun) * 1e3
        assert promotion.loaded_blocks == len(wanted)
        promotion.close()
        return took_ms

    async def scene(self, name: str, order: Order) -> Times:
        """One of them; nothing is in memory before."""
        self.promoter = Promoter(self.dram, DiskSet([self.disk]), order=order)
        match name:
            case "short_behind_long":
                long, short = await asyncio.gather(
                    self.pin(keys(0, LONG_BLOCKS)), self.pin(keys(LONG_BLOCKS, 1))
                )
                times = {"long": long, "short": short}
            case "shorts_in_long":
                times = await self._shorts_in_long()
            case _:
                part = LONG_BLOCKS // 4
                ends = await asyncio.gather(*(self.pin(keys(n * part, part)) for n in range(4)))
                times = {"first": ends[0], "mean": statistics.mean(ends), "last": max(ends)}
        await self.promoter.close(timeout_s=_WAIT_S)
        for key in keys(0, LONG_BLOCKS + SHORTS):
            if (block := self.dram.get(key)) is not None:
                self.dram.table.drop(block)
        return times

    async def _shorts_in_long(self) -> Times:
        long = asyncio.create_task(self.pin(keys(0, LONG_BLOCKS)))
        await asyncio.sleep(0)
        shorts: list[float] = []
        while not long.done() and len(shorts) < SHORTS:
            shorts.append(await self.pin(keys(LONG_BLOCKS + len(shorts), 1)))
        return {"long": await long, "short": statistics.median(shorts), "shorts": len(shorts)}


async def measure(directory: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Every scene with both orders."""
    node = FilledNode(directory)
    await node.fill()
    found: dict[tuple[str, Order], list[Times]] = {}
    rng = random.Random(1)
    for number in range(-1, rounds):  # the first one touches the memory
        cells = [(scene, order) for scene in SCENES for order in ORDERS]
        for scene, order in rng.sample(cells, len(cells)):
            times = await node.scene(scene, order)
            if number >= 0:
                found.setdefault((scene, order), []).append(times)
    node.disk.close()
    rows: dict[str, dict[str, float]] = {}
    for scene in SCENES:
        mine, other = found[scene, ORDERS[0]], found[scene, ORDERS[1]]
        rows[scene] = {}
        for name in mine[0]:
            rows[scene][f"{name}_ours"] = round(statistics.median(each[name] for each in mine), 2)
            rows[scene][f"{name}_first_come"] = round(statistics.median(each[name] for each in other), 2)
            ratios = (a[name] / b[name] for a, b in zip(mine, other, strict=True))
            rows[scene][f"{name}_ratio"] = round(statistics.median(ratios), 3)
    return rows


def main() -> None:
    """Measure and print."""
    parser = bench_parser("kvstore.pins", __doc__)
    parser.add_argument("--dir", type=Path, help="where to write, on the disk to measure; default: temporary")
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.dir) as directory:
        found = asyncio.run(measure(Path(directory), asked.rounds))
    if asked.json:
        print(json.dumps(found))
        return
    for scene, row in found.items():
        for name in [each.removesuffix("_ratio") for each in row if each.endswith("_ratio")]:
            print(
                f"{scene:18} {name:7} ours {row[f'{name}_ours']:8.2f}, "
                f"first come {row[f'{name}_first_come']:8.2f} ({row[f'{name}_ratio']:.3f})"
            )


if __name__ == "__main__":
    main()

"""The pool tier's loads into a node's memory, against the bare client of Mooncake Store.

    python -m bench.kvstore.pool_tier                 # 1 MiB blocks in batches of 16
    python -m bench.kvstore.pool_tier --json

One pool, one agent that holds all values, and two readers in turns, both from another process than it:

    tier      find, fetch by the reader's agent, copy into slots of its memory, every block verified twice
    client    `batch_get_into` of the same values into registered memory, nothing is verified

A side's figure is the median of its turns; the ratio is the median of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.kvstore.pool_node import open_master
from libs.common.checksum import checksum_at, memory_at
from libs.common.transport.mooncake import engine_environment
from libs.common.transport.registered_memory import PageAlignedMemory
from services.kvstore.dram.tier import DramTier
from services.kvstore.pool.config import PoolOptions
from services.kvstore.pool.tier import PoolTier
from services.kvstore.pool.value import HEADER_BYTES, name_of

MIB = 1 << 20
BATCHES = 6
_READY_S = 60.0


class PoolNode:
    """A part of a kvstore node: memory and the pool."""

    def __init__(self, master: str, *, dram_bytes: int, segment_bytes: int) -> None:
        self.dram = DramTier(dram_bytes)
        self.pool = PoolTier(self.dram, PoolOptions(master, segment_bytes=segment_bytes))
        self.pool.start()

    async def ready(self) -> None:
        async with asyncio.timeout(_READY_S):
            while self.pool.unavailable:
                await asyncio.sleep(0.05)

    async def put(self, keys: list[bytes], n_bytes: int) -> None:
        for number, key in enumerate(keys):
            slot = self.dram.table.allocate(n_bytes)
            assert slot is not None
            address = self.dram.address_of(slot)
            memory_at(address, n_bytes)[:] = random.Random(number).randbytes(n_bytes)
            self.dram.table.publish(key, slot, n_bytes, checksum_at(address, n_bytes))
        self.pool.offer(keys)
        assert await self.pool.writes.flush(timeout_s=_READY_S)

    async def load(self, keys: list[bytes]) -> float:
        """Seconds until all are in memory; they are forgotten afterwards."""
        started = time.perf_counter()
        promotion = self.pool.promote(await self.pool.find(keys, wait_s=5))
        await promotion.wait(timeout_s=10)
        took_s = time.perf_counter() - started
        for key in keys:
            block = promotion.pop(key)
            assert block is not None, "a block did not come"
            self.dram.table.unhold(block)
            self.dram.table.drop(block)
        promotion.close()
        return took_s


class BareClient:
    """Mooncake Store's own client, in this process."""

    def __init__(self, master: str, *, batch_blocks: int, value_bytes: int) -> None:
        os.environ.update(engine_environment("127.0.0.1"))
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        assert self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master) == 0
        self._memory = PageAlignedMemory(batch_blocks * value_bytes)
        assert self._store.register_buffer(self._memory.address, self._memory.n_bytes) == 0
        self._addresses = [self._memory.address + i * value_bytes for i in range(batch_blocks)]
        self._sizes = [value_bytes] * batch_blocks

    def load(self, keys: list[bytes]) -> float:
        """Seconds until all are in its memory."""
        names = [name_of(key) for key in keys]
        started = time.perf_counter()
        codes = self._store.batch_get_into(names, self._addresses, self._sizes)
        took_s = time.perf_counter() - started
        assert list(codes) == self._sizes, codes
        return took_s

    def close(self) -> None:
        self._store.close()


async def measure(*, block_bytes: int, batch_blocks: int, turns: int) -> dict[str, Any]:
    """GB/s of each side and turn."""
    n_bytes = block_bytes * batch_blocks
    batches = [[os.urandom(16) for _ in range(batch_blocks)] for _ in range(BATCHES)]
    keys = [key for batch in batches for key in batch]
    found: dict[str, list[float]] = {"tier": [], "client": []}
    with (
        tempfile.TemporaryDirectory() as directory,
        open_master(Path(directory), offload=False) as master,
    ):
        holder = PoolNode(master, dram_bytes=2 * BATCHES * n_bytes, segment_bytes=4 * BATCHES * n_bytes)
        reader = PoolNode(master, dram_bytes=max(4 * n_bytes, 16 * block_bytes), segment_bytes=0)
        try:
            await holder.ready()
            await reader.ready()
            await holder.put(keys, block_bytes)
            client = BareClient(master, batch_blocks=batch_blocks, value_bytes=block_bytes + HEADER_BYTES)
            for turn in range(turns + 1):
                ours = sum([await reader.load(batch) for batch in batches])
                bare = sum([await asyncio.to_thread(client.load, batch) for batch in batches])
                if turn:  # the first makes first contacts
                    found["tier"].append(BATCHES * n_bytes / ours / 1e9)
                    found["client"].append(BATCHES * n_bytes / bare / 1e9)
            client.close()
        finally:
            await reader.pool.close(flush_timeout_s=1)
            await holder.pool.close(flush_timeout_s=1)
    ratios = [ours / bare for ours, bare in zip(found["tier"], found["client"], strict=True)]
    return {
        "block_bytes": block_bytes,
        "batch_blocks": batch_blocks,
        "tier_gb_s": round(statistics.median(found["tier"]), 3),
        "client_gb_s": round(statistics.median(found["client"]), 3),
        "ratio": round(statistics.median(ratios), 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kvstore.pool_tier", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--block-bytes", type=int, default=MIB, help="of each block")
    parser.add_argument("--batch-blocks", type=int, default=16, help="blocks of one load")
    parser.add_argument("--turns", type=int, default=9, help="measured turns of each side")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args()
    found = asyncio.run(
        measure(block_bytes=parsed.block_bytes, batch_blocks=parsed.batch_blocks, turns=parsed.turns)
    )
    if parsed.json:
        print(json.dumps(found))
    else:
        print(
            f"{found['batch_blocks']} x {found['block_bytes']} bytes: pool tier {found['tier_gb_s']} GB/s, "
            f"bare client {found['client_gb_s']} GB/s, ratio {found['ratio']}"
        )


if __name__ == "__main__":
    main()

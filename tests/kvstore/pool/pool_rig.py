"""Members of a pool in one process, each with its own memory and agent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from libs.common.checksum import checksum, memory_at
from services.kvstore.dram.tier import DramTier
from services.kvstore.pool.config import PoolOptions
from services.kvstore.pool.tier import PoolTier

BLOCK_BYTES = 100_000
SEGMENT_BYTES = 32 << 20
FIND_S = 60.0  # in place of the half second of a node


class Member:
    """One member of a pool. With `segment_bytes` 0 it puts and reads but contributes no memory."""

    def __init__(
        self, master: str, *, segment_bytes: int = 0, replicas: int = 1, admin: str | None = None
    ) -> None:
        self.dram = DramTier(16 << 20)
        options = PoolOptions(
            master,
            segment_bytes=segment_bytes,
            replicas=replicas,
            staging_bytes=8 << 20,
            admin=() if admin is None else (admin,),
        )
        self.pool = PoolTier(self.dram, options)
        self.pool.start()

    @property
    def agent(self) -> int:
        assert self.pool.client.pid is not None
        return self.pool.client.pid

    async def until(self, *, unavailable: bool, timeout_s: float = 200) -> None:
        async with asyncio.timeout(timeout_s):
            while self.pool.unavailable != unavailable:
                await asyncio.sleep(0.02)

    async def put(self, numbers: Sequence[int]) -> None:
        """Create the blocks, put them into the pool and drop them from this memory."""
        for number in numbers:
            slot = self.dram.table.allocate(BLOCK_BYTES)
            assert slot is not None
            memory_at(self.dram.address_of(slot), BLOCK_BYTES)[:] = payload(number)
            self.dram.table.publish(key(number), slot, BLOCK_BYTES, checksum(payload(number)))
        self.pool.offer([key(number) for number in numbers])
        assert await self.pool.writes.flush(timeout_s=60)
        self.drop_from_memory(numbers)

    def drop_from_memory(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (block := self.dram.get(key(number))) is not None:
                self.dram.table.drop(block)

    async def find(self, numbers: Sequence[int]) -> set[int]:
        found = await self.pool.find([key(number) for number in numbers], wait_s=FIND_S)
        return {number for number in numbers if key(number) in found}

    async def fetch(self, numbers: Sequence[int], *, timeout_s: float = 60) -> set[int]:
        """Return the blocks that the pool delivers with every byte verified; none stays in this memory."""
        sizes = await self.pool.find([key(number) for number in numbers], wait_s=FIND_S)
        promotion = self.pool.promote(sizes)
        await promotion.wait(timeout_s=timeout_s)
        delivered = set()
        for number in numbers:
            block = promotion.pop(key(number))
            if block is not None:
                address = self.dram.address_of(block.slot)
                assert bytes(memory_at(address, block.n_bytes)) == payload(number)
                assert block.value == checksum(payload(number))
                self.dram.table.unhold(block)
                delivered.add(number)
        promotion.close()
        self.drop_from_memory(numbers)
        return delivered

    async def at_rest(self) -> None:
        """Wait until no block is held or staged."""
        async with asyncio.timeout(60):
            while self.pool.client.staged_bytes or self.pool.held_blocks:
                await asyncio.sleep(0.05)
        self.dram.table.check()
        assert self.dram.table.n_evictable == self.dram.table.n_blocks

    async def close(self) -> None:
        await self.pool.close(flush_timeout_s=2)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)

"""Operator commands on a node's blocks: verify them in place, drop them.

Both work block by block and yield the event loop to requests in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from services.kvstore.core.store import BlockStore
from slipstream.errors import NotFound, Unavailable
from slipstream.v1.common_pb2 import CacheTier

PROGRESS_S = 0.5
FLUSH_S = 10.0


@dataclass(slots=True)
class Progress:
    """Progress of a verification; `corrupt` are the hashes found since the last report."""

    copies: int
    verified: int = 0
    unreadable: int = 0
    corrupt: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Dropped:
    """Result of a drop: copies removed in all tiers, and distinct blocks of this node.

    `pool_kept`: the pool did not answer and keeps its copies.
    """

    copies: int = 0
    blocks: int = 0
    pool_kept: bool = False


class Operations:
    """Operator commands on one store. Event loop only."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.corrupt_blocks_dram = 0

    async def verify(self, keys: Sequence[bytes]) -> AsyncGenerator[tuple[Progress, bool], None]:
        """Verify the blocks (all held blocks for none). Yields progress; the last report has True."""
        copies = self._copies(keys or self._all())
        progress, reported_at_s = Progress(len(copies)), time.monotonic()
        verifiers = {
            CacheTier.CACHE_TIER_DRAM: self._verify_dram,
            CacheTier.CACHE_TIER_NVME: self._verify_disk,
            CacheTier.CACHE_TIER_POOL: self._verify_pool,
        }
        for tier, key in copies:
            try:
                whole = await verifiers[tier](key)
            except NotFound:
                whole = True  # evicted meanwhile
            except Unavailable:
                whole = True
                progress.unreadable += 1
            await asyncio.sleep(0)
            progress.verified += 1
            if not whole:
                progress.corrupt.append(key)
            if time.monotonic() - reported_at_s >= PROGRESS_S:
                yield progress, False
                progress.corrupt = []
                reported_at_s = time.monotonic()
        yield progress, True

    async def drop(self, keys: Sequence[bytes] | None) -> Dropped:
        """Drop the blocks, or all for None, from all tiers, the shared pool included."""
        if self._store.write_behind is not None:
            await self._store.write_behind.flush(timeout_s=FLUSH_S)  # a later write would store them again
        with self._store.tombstones.dropping(keys):
            return await self._drop(keys)

    async def _drop(self, keys: Sequence[bytes] | None) -> Dropped:
        gone: set[bytes] = set()
        dropped = Dropped()
        copies = self._copies(self._all() if keys is None else keys)
        for tier, key in copies:
            if tier == CacheTier.CACHE_TIER_DRAM:
                block = self._store.dram.get(key)
                if block is None:
                    continue
                self._store.dram.table.drop(block)
            elif self._store.disk is None or not await self._store.disk.drop(key):
                continue
            await asyncio.sleep(0)
            gone.add(key)
            dropped.copies += 1
        dropped.blocks = len(gone)
        if self._store.pool is not None:
            try:
                dropped.copies += await self._store.pool.drop(keys)
            except Unavailable:
                dropped.pool_kept = True
        return dropped

    def _all(self) -> list[bytes]:
        on_disk = self._store.disk.keys() if self._store.disk is not None else []
        in_pool = self._store.pool.known() if self._store.pool is not None else []
        return list(dict.fromkeys([*self._store.dram.table.keys(), *on_disk, *in_pool]))

    def _copies(self, keys: Sequence[bytes]) -> list[tuple[CacheTier.ValueType, bytes]]:
        store = self._store
        distinct = dict.fromkeys(keys)
        in_dram = [(CacheTier.CACHE_TIER_DRAM, key) for key in distinct if store.dram.get(key) is not None]
        on_disk = [
            (CacheTier.CACHE_TIER_NVME, key)
            for key in distinct
            if store.disk is not None and store.disk.contains(key)
        ]
        known = set(store.pool.known()) if store.pool is not None else set()
        in_pool = [(CacheTier.CACHE_TIER_POOL, key) for key in distinct if key in known]
        return [*in_dram, *on_disk, *in_pool]

    async def _verify_dram(self, key: bytes) -> bool:
        dram = self._store.dram
        block = dram.get(key)
        if block is None:
            raise NotFound("no such block")
        # On the event loop: it takes microseconds, and the slot cannot change meanwhile.
        whole = dram.checksum.at(dram.address_of(block.slot), block.n_bytes) == block.value
        if not whole:
            dram.table.drop(block)
            self.corrupt_blocks_dram += 1
        return whole

    async def _verify_disk(self, key: bytes) -> bool:
        if self._store.disk is None:
            raise NotFound("no such block")
        return await self._store.disk.verify(key)

    async def _verify_pool(self, key: bytes) -> bool:
        if self._store.pool is None:
            raise NotFound("no such block")
        return await self._store.pool.verify(key)

"""Blocks on their way from disk to DRAM.

A promotion is shared by all who want the block, and it owns the destination slot until the disk has
let go of it. Whoever waits may give up, and does when the disk goes away; the promotion then ends by
itself and the block stays.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from libs.common.errors import SlipstreamError
from services.kvstore.disk_set import DiskSet
from services.kvstore.dram_tier import DramTier
from services.kvstore.slots import Block

log = logging.getLogger(__name__)

# Slots in memory that wait for a disk at once. Enough for runs of neighbours to be read together.
CONCURRENT = 64


class Promoter:
    """Promotions in progress. Event loop only."""

    def __init__(self, dram: DramTier, disks: DiskSet) -> None:
        self._dram = dram
        self._disks = disks
        self._running: dict[bytes, asyncio.Task[Block[bytes] | None]] = {}
        self._waiters: dict[bytes, int] = {}
        # Of each disk its own: one that hangs does not keep the others waiting.
        self._slots = {tier: asyncio.Semaphore(CONCURRENT) for tier in disks.tiers}
        self._went_away: asyncio.Future[None] | None = None
        for tier in disks.tiers:
            tier.on_away = self._some_disk_went_away

    async def promote_and_hold(self, key: bytes) -> Block[bytes] | None:
        """The block in DRAM, held once for the caller; None when it cannot be had. May be cancelled."""
        self._waiters[key] = self._waiters.get(key, 0) + 1
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._promote(key))
        try:
            return await self._outcome(key, task)
        except asyncio.CancelledError:
            if not task.done():
                self._waiters[key] -= 1
            elif not task.cancelled() and (block := task.result()) is not None:
                self._dram.table.unhold(block)
            raise

    async def _outcome(self, key: bytes, task: asyncio.Task[Block[bytes] | None]) -> Block[bytes] | None:
        """What the promotion gives, or None at once when the block's disk goes away."""
        while not task.done():
            if self._went_away is None:
                self._went_away = asyncio.get_running_loop().create_future()
            went_away = self._went_away
            waiting: set[asyncio.Future[Any]] = {task, went_away}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not self._disks.contains(key):
                self._waiters[key] -= 1
                return None
        return task.result()

    def _some_disk_went_away(self) -> None:
        if self._went_away is not None:
            self._went_away.set_result(None)
            self._went_away = None

    async def close(self, *, timeout_s: float) -> None:
        """Wait for what runs."""
        if self._running:
            await asyncio.wait(set(self._running.values()), timeout=timeout_s)

    async def _promote(self, key: bytes) -> Block[bytes] | None:
        """Load the block and hold it once for each of those who still wait."""
        block: Block[bytes] | None = None
        try:
            tier = self._disks.tier_of(key)
            if tier is None:
                block = self._dram.get(key)
            else:
                async with self._slots[tier]:
                    block = self._dram.get(key) or await self._load(key)
        finally:
            waiters = self._waiters.pop(key)
            del self._running[key]
        if block is not None:
            for _ in range(waiters):
                self._dram.table.hold(block)
        return block

    async def _load(self, key: bytes) -> Block[bytes] | None:
        on_disk = self._disks.get(key)
        slot = None if on_disk is None else self._dram.table.allocate(on_disk.n_bytes)
        if slot is None:
            return None
        try:
            n_bytes, checksum = await self._disks.read(key, self._dram.address_of(slot))
        except SlipstreamError as error:
            log.info("block %s not promoted: %s", key.hex(), error)
            self._dram.table.free(slot)
            return None
        except Exception:
            # Not so for a cancel, which nobody asks for: the disk may still write to the slot.
            self._dram.table.free(slot)
            raise
        existing = self._dram.get(key)
        if existing is not None:  # put again meanwhile
            self._dram.table.free(slot)
            return existing
        return self._dram.table.publish(key, slot, n_bytes, checksum)

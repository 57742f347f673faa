"""Write-behind from DRAM to disk: a put is readable at once and durable soon after.

`durable` waits until a disk has synced the blocks. While no disk takes blocks they stay queued, and `durable`
does not wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from services.kvstore.disk.set import DiskSet
from services.kvstore.disk.table.policy import BlockOrigin
from services.kvstore.dram.slots import Block
from services.kvstore.dram.tier import DramTier
from services.kvstore.loading.write_queue import WriteQueue
from services.kvstore.policy.quota import NO_TENANT

log = logging.getLogger(__name__)

CLOSE_WAIT_S = 0.5
# Reciprocal of the memory part that running writes may keep from eviction.
WRITING_PART = 8


class DiskWriteBehind:
    """Blocks that are queued for the disks, and those being written. Event loop only."""

    def __init__(self, dram: DramTier, disks: DiskSet) -> None:
        self._dram = dram
        self._disks = disks
        self._waiting = WriteQueue(on_discard=self._resolve)
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._waiters: dict[bytes, asyncio.Future[None]] = {}
        self._writing_bytes = 0
        self._started = False
        self._closing = False
        self._disk_changes = 0  # state changes of any disk
        for tier in disks.tiers:
            tier.listeners.append(self)

    @property
    def writing(self) -> int:
        """Number of blocks that running writes hold in memory."""
        return len(self._running)

    @property
    def dropped_blocks(self) -> int:
        """Number of blocks removed from the full queue because puts outran the disks."""
        return self._waiting.dropped_blocks

    @property
    def waiting(self) -> int:
        """Number of blocks that are queued or being written."""
        return len(self._waiting) + len(self._running)

    def start(self) -> None:
        """Start writing; needs a running loop."""
        self._started = True
        self._pump()

    def add(self, key: bytes) -> None:
        """Queue a block that was published in DRAM."""
        if self._closing:
            return
        self._waiting.add(key)
        self._pump()

    def add_if_missing(self, key: bytes) -> bool:
        """Queue the block unless a disk has it or it is queued; returns whether it was added."""
        if key in self._waiting or key in self._running or self._disks.contains(key):
            return False
        self.add(key)
        return True

    def blocks_lost(self, keys: Sequence[bytes]) -> None:
        """Queue again those lost blocks that are still in memory."""
        for key in keys:
            if self._dram.get(key) is not None:
                self.add(key)

    async def durable(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bytes]:
        """The blocks of `keys` that are synced on a disk. Waits for queued and running writes."""
        if timeout_s > 0 and self._disks.takes_blocks:
            loop = asyncio.get_running_loop()
            waiting = [
                self._waiters.setdefault(key, loop.create_future())
                for key in keys
                if not self._disks.contains(key) and (key in self._waiting or key in self._running)
            ]
            if waiting:
                await asyncio.wait(waiting, timeout=timeout_s)
        return [key for key in keys if self._disks.contains(key)]

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until no write is queued or running; False on time-out."""
        return await self._waiting.wait_idle(timeout_s=timeout_s)

    async def close(self) -> None:
        """Clear the queue and wait for running writes, at most CLOSE_WAIT_S."""
        self._closing = True
        for key in list(self._waiting):
            self._resolve(key)
        self._waiting.clear()
        if self._running:
            await asyncio.wait(set(self._running.values()), timeout=CLOSE_WAIT_S)

    def _pump(self) -> None:
        """Start as many writes as the disks take."""
        most = self._disks.max_writing_blocks if self._disks.takes_blocks and self._started else 0
        while self._waiting and len(self._running) < most:
            key = self._waiting.first()
            block = self._dram.get(key)
            if block is None or key in self._running or self._disks.contains(key):
                self._waiting.remove(key)
                if key not in self._running:
                    self._resolve(key)
                continue
            n_bytes = self._writing_bytes + block.slot.slot_bytes
            if self._running and n_bytes * WRITING_PART > self._dram.memory.n_bytes:
                break
            self._waiting.remove(key)
            self._writing_bytes = n_bytes
            self._dram.table.hold(block)
            self._running[key] = asyncio.create_task(self._write(block))
        # The queue is not idle either while a disk that is back has blocks to write.
        self._waiting.set_idle(not self._running and not (self._waiting and self._disks.takes_blocks))

    async def _write(self, block: Block[bytes]) -> None:
        disk_changes = self._disk_changes
        try:
            address = self._dram.address_of(block.slot)
            written = await self._disks.write(
                block.key, address, block.n_bytes, block.value, self._origin(block)
            )
            if written and self._dram.get(block.key) is not block:  # dropped: held blocks are not evicted
                await self._disks.drop(block.key)
                if self._dram.get(block.key) is not None:  # and put again
                    self._waiting.add(block.key)
            # A disk that failed may be back before this write's failure arrives.
            changed = disk_changes != self._disk_changes
            if not written and (changed or not self._disks.takes_blocks) and not self._closing:
                self._waiting.add(block.key)  # until a disk is back
        except Exception:  # only this block fails
            log.exception("block %s not written", block.key.hex())
        finally:
            self._dram.table.unhold(block)
            self._writing_bytes -= block.slot.slot_bytes
            del self._running[block.key]
            self._resolve(block.key)
            self._pump()

    def _origin(self, block: Block[bytes]) -> BlockOrigin:
        """The block's tenant and position in its chain, as the memory tier knows them."""
        table = self._dram.table
        tenant = table.quota.tenant_of(block.key) if table.quota is not None else NO_TENANT
        location = table.policy(block.slot.slot_bytes).location(block.key)
        return BlockOrigin(tenant=tenant) if location is None else BlockOrigin(*location, tenant)

    def disk_changed(self) -> None:
        """End waits for disks that take no blocks."""
        self._disk_changes += 1
        if not self._disks.takes_blocks:
            for key in list(self._waiters):
                self._resolve(key)
        self._pump()

    def _resolve(self, key: bytes) -> None:
        waiter = self._waiters.pop(key, None)
        if waiter is not None:
            waiter.set_result(None)

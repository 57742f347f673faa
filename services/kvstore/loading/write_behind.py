"""DRAM to disk, behind the back of Commit: a put is readable at once and durable soon after.

Who wants to know when waits: a block is durable when a disk has synced it. While no disk takes blocks they
wait, and nobody waits for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from services.kvstore.disk.policy import Origin
from services.kvstore.disk.set import DiskSet
from services.kvstore.dram.slots import Block
from services.kvstore.dram.tier import DramTier
from services.kvstore.loading.write_queue import WriteQueue
from services.kvstore.policy.quota import NOBODY

log = logging.getLogger(__name__)

CLOSE_WAIT_S = 0.5
# Of the memory, this part may be kept from eviction because it is being written.
WRITING_PART = 8


class DiskWriteBehind:
    """Blocks waiting to be written, and those being written. Event loop only."""

    def __init__(self, dram: DramTier, disks: DiskSet) -> None:
        self._dram = dram
        self._disks = disks
        self._waiting = WriteQueue(on_given_up=self._settle)
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._settled: dict[bytes, list[asyncio.Future[bool]]] = {}
        self._writing_bytes = 0
        self._started = False
        self._closing = False
        self._disk_changes = 0  # of any disk's state
        for tier in disks.tiers:
            tier.on_lost = self.add_again
            tier.watch.on_state = self._disks_changed

    @property
    def writing(self) -> int:
        """Blocks in memory that are held because they are being written."""
        return len(self._running)

    @property
    def dropped_blocks(self) -> int:
        """Blocks that were given up, as puts outran the disks."""
        return self._waiting.dropped_blocks

    @property
    def waiting(self) -> int:
        """Blocks that are to be written, those being written included."""
        return len(self._waiting) + len(self._running)

    def start(self) -> None:
        """Start writing; needs a running loop."""
        self._started = True
        self._pump()

    def add(self, key: bytes) -> None:
        """The block was published in DRAM."""
        if self._closing:
            return
        self._waiting.add(key)
        self._pump()

    def add_missing(self, key: bytes) -> bool:
        """Add the block unless it is on a disk or on its way to one; whether it was added."""
        if key in self._waiting or key in self._running or self._disks.contains(key):
            return False
        self.add(key)
        return True

    def add_again(self, keys: Sequence[bytes]) -> None:
        """A disk lost these blocks; those that are still in memory are written anew."""
        for key in keys:
            if self._dram.get(key) is not None:
                self.add(key)

    async def durable(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bytes]:
        """Those of `keys` that are on a disk, synced; waits for the others that are on their way."""
        waiting = []
        for key in keys:
            if not self._disks.contains(key) and (key in self._waiting or key in self._running):
                settled = asyncio.get_running_loop().create_future()
                self._settled.setdefault(key, []).append(settled)
                waiting.append(settled)
        if waiting and timeout_s > 0 and self._disks.takes_blocks:
            await asyncio.wait(waiting, timeout=timeout_s)
        return [key for key in keys if self._disks.contains(key)]

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until nothing waits or is being written; False when that took too long."""
        return await self._waiting.until_idle(timeout_s=timeout_s)

    async def close(self) -> None:
        """Give up what waits; returns when the writes that run have ended, or their disk hangs."""
        self._closing = True
        for key in list(self._waiting):
            self._settle(key)
        self._waiting.clear()
        if self._running:
            await asyncio.wait(set(self._running.values()), timeout=CLOSE_WAIT_S)

    def _pump(self) -> None:
        """Begin as many writes as the disks take."""
        most = self._disks.max_writing_blocks if self._disks.takes_blocks and self._started else 0
        while self._waiting and len(self._running) < most:
            key = self._waiting.first()
            block = self._dram.get(key)
            if block is None or key in self._running or self._disks.contains(key):
                self._waiting.remove(key)
                if key not in self._running:
                    self._settle(key)
                continue
            n_bytes = self._writing_bytes + block.slot.slot_bytes
            if self._running and n_bytes * WRITING_PART > self._dram.memory.n_bytes:
                break
            self._waiting.remove(key)
            self._writing_bytes = n_bytes
            self._dram.table.hold(block)
            self._running[key] = asyncio.create_task(self._write(block))
        # Not idle, either, when a disk that is back goes on with what waited for it.
        self._waiting.tell(idle=not self._running and not (self._waiting and self._disks.takes_blocks))

    async def _write(self, block: Block[bytes]) -> None:
        disk_changes = self._disk_changes
        try:
            address = self._dram.address_of(block.slot)
            taken = await self._disks.write(
                block.key, address, block.n_bytes, block.value, self._origin(block)
            )
            if taken and self._dram.get(block.key) is not block:  # dropped, as what is held is not evicted
                await self._disks.drop(block.key)
                if self._dram.get(block.key) is not None:  # and put again
                    self._waiting.add(block.key)
            # A disk that failed may be back before this write is told of it.
            changed = disk_changes != self._disk_changes
            if not taken and (changed or not self._disks.takes_blocks) and not self._closing:
                self._waiting.add(block.key)  # for when a disk is back
        except Exception:  # this block is not kept; the next one may be
            log.exception("block %s not written", block.key.hex())
        finally:
            self._dram.table.unhold(block)
            self._writing_bytes -= block.slot.slot_bytes
            del self._running[block.key]
            self._settle(block.key)
            self._pump()

    def _origin(self, block: Block[bytes]) -> Origin:
        """What the memory tier knows of the block."""
        table = self._dram.table
        tenant = table.quota.owner(block.key) if table.quota is not None else NOBODY
        place = table.policy(block.slot.slot_bytes).place(block.key)
        return Origin(tenant=tenant) if place is None else Origin(*place, tenant)

    def _disks_changed(self) -> None:
        self._disk_changes += 1
        if not self._disks.takes_blocks:
            for key in list(self._settled):
                self._settle(key)
        self._pump()

    def _settle(self, key: bytes) -> None:
        for settled in self._settled.pop(key, ()):
            if not settled.done():
                settled.set_result(True)

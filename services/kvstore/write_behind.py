"""DRAM to disk, behind the back of Commit: a put is acknowledged from memory and written soon after.

What a crash loses is a cache entry. The queue is bounded: when puts outrun the disk, the oldest
waiting block is given up (it stays in memory until it is evicted).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from services.kvstore.disk_tier import DiskTier
from services.kvstore.dram_tier import DramTier

log = logging.getLogger(__name__)

MAX_WAITING_BLOCKS = 4096
WRITERS = 2


class WriteBehind:
    """Blocks waiting to be written, and the tasks that write them. Event loop only."""

    def __init__(self, dram: DramTier, disk: DiskTier) -> None:
        self._dram = dram
        self._disk = disk
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        self._writers: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self.writing = 0
        self.dropped_blocks = 0

    def start(self) -> None:
        """Start the writers; needs a running loop."""
        self._writers = [asyncio.create_task(self._write_forever()) for _ in range(WRITERS)]

    def add(self, key: bytes) -> None:
        """The block was published in DRAM."""
        self._waiting[key] = None
        if len(self._waiting) > MAX_WAITING_BLOCKS:
            self._waiting.popitem(last=False)
            self.dropped_blocks += 1
        self._idle.clear()
        self._wake.set()

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until nothing waits or is being written; False when that took too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Give up what waits; returns when the writers have ended their writes."""
        self._waiting.clear()
        self._closing = True
        self._wake.set()
        await asyncio.gather(*self._writers, return_exceptions=True)

    async def _write_forever(self) -> None:
        while True:
            if not self._waiting:
                if not self.writing:
                    self._idle.set()
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            key, _ = self._waiting.popitem(last=False)
            block = self._dram.get(key)
            if block is None or self._disk.contains(key):
                continue
            self._dram.table.hold(block)
            self.writing += 1
            try:
                address = self._dram.address_of(block.slot)
                await self._disk.write(key, address, block.n_bytes, block.value)
            except Exception:  # this block is not kept; the next one may be
                log.exception("block %s not written", key.hex())
            finally:
                self.writing -= 1
                self._dram.table.unhold(block)

"""Scrub: reads and verifies every block of a disk repeatedly, at a bounded rate.

Without a scrub, damage in a block stays unnoticed until a read. The scrub drops and counts damaged blocks,
so that the next put writes them again.
"""

from __future__ import annotations

import asyncio
import logging

from services.kvstore.disk.tier import DiskTier
from slipstream.errors import Unavailable

log = logging.getLogger(__name__)

CLOSE_WAIT_S = 2.0
PAUSE_S = 1.0  # while there is nothing to verify or the disk is not OK


class Scrubber:
    """The scrub of one disk. Event loop only."""

    def __init__(self, tier: DiskTier, *, bytes_per_s: int, pause_s: float = PAUSE_S) -> None:
        """Verifies at most `bytes_per_s` of payload; 0 = no scrub."""
        self._tier = tier
        self._bytes_per_s = bytes_per_s
        self._pause_s = pause_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task; needs a running loop."""
        if self._bytes_per_s:
            self._task = asyncio.create_task(self._scrub_forever())

    async def close(self) -> None:
        """Stop; returns when the running verification has ended, or after CLOSE_WAIT_S."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_WAIT_S)

    async def _scrub_forever(self) -> None:
        while True:
            for row in self._tier.table.rows().tolist():
                while self._tier.unavailable:
                    await asyncio.sleep(self._pause_s)
                block = self._tier.table.at(row)
                if block is None:
                    continue
                verifying = asyncio.ensure_future(self._tier.verify(block))
                try:
                    await asyncio.shield(verifying)
                except Unavailable as error:
                    log.info("scrub: %s", error)
                    await asyncio.sleep(self._pause_s)
                except asyncio.CancelledError:
                    await asyncio.gather(verifying, return_exceptions=True)
                    raise
                await asyncio.sleep(block.n_bytes / self._bytes_per_s)
            await asyncio.sleep(self._pause_s)

"""Queue of blocks in memory that wait for a background write, to a disk or to the pool."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator

MAX_WAITING_BLOCKS = 4096


class WriteQueue:
    """Hashes of queued blocks, each once, in arrival order. Event loop only.

    The queue is bounded: if puts outrun the writer, it discards its oldest block. That block stays in memory
    until its eviction.
    """

    def __init__(self, on_discard: Callable[[bytes], None]) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._on_discard = on_discard
        self._idle = asyncio.Event()
        self._idle.set()
        self.dropped_blocks = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """Append the block; a queued block keeps its position."""
        self._keys.setdefault(key)
        while len(self._keys) > MAX_WAITING_BLOCKS:
            self.discard(self.first())

    def first(self) -> bytes:
        """The oldest block of a queue that is not empty."""
        return next(iter(self._keys))

    def remove(self, key: bytes) -> None:
        """Remove the block, if it is queued."""
        self._keys.pop(key, None)

    def discard(self, key: bytes) -> None:
        """Remove a block that will not be written, and report it to `on_discard`."""
        self.remove(key)
        self.dropped_blocks += 1
        self._on_discard(key)

    def clear(self) -> None:
        """Remove all blocks."""
        self._keys.clear()

    def set_idle(self, idle: bool) -> None:
        """Set whether no write runs and no queued block can be written."""
        if idle:
            self._idle.set()
        else:
            self._idle.clear()

    async def wait_idle(self, *, timeout_s: float) -> bool:
        """Wait until the queue is idle; False on time-out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

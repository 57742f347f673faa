"""Blocks in memory that wait to be written somewhere behind the back of Commit: to the disks, to the pool."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator

MAX_WAITING_BLOCKS = 4096


class WriteQueue:
    """The hashes of such blocks, each once, first come first served. Event loop only.

    Bounded: when puts outrun what takes them, the block that waits for longest is given up. It stays in
    memory until it is evicted.
    """

    def __init__(self, on_given_up: Callable[[bytes], None]) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._on_given_up = on_given_up
        self._idle = asyncio.Event()
        self._idle.set()
        self.dropped_blocks = 0  # given up

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """The block waits; one that does so already keeps its place."""
        self._keys.setdefault(key)
        while len(self._keys) > MAX_WAITING_BLOCKS:
            self.give_up(self.first())

    def first(self) -> bytes:
        """The one that waits for longest, of those there are."""
        return next(iter(self._keys))

    def remove(self, key: bytes) -> None:
        """It waits no longer, if it did."""
        self._keys.pop(key, None)

    def give_up(self, key: bytes) -> None:
        """It is not going to be written."""
        self.remove(key)
        self.dropped_blocks += 1
        self._on_given_up(key)

    def clear(self) -> None:
        """None waits any longer."""
        self._keys.clear()

    def tell(self, *, idle: bool) -> None:
        """Whether nothing is being written, and nothing of what waits can be."""
        if idle:
            self._idle.set()
        else:
            self._idle.clear()

    async def until_idle(self, *, timeout_s: float) -> bool:
        """Wait until that is so; False when that took too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

"""Drops and the loads that they overtake. Pure.

A block that is dropped while it is on its way to memory, from a disk or from the pool, would come back by
that. So a load remembers the epoch in which it began, and asks before it publishes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Beyond so many it counts as a drop of all: loads that run then are misses.
MAX_REMEMBERED_BLOCKS = 65_536


class Tombstones:
    """Which blocks are being dropped, and were lately."""

    def __init__(self) -> None:
        self.epoch = 0
        self._running: list[frozenset[bytes] | None] = []  # None: all blocks
        self._dropped: dict[bytes, int] = {}  # in which epoch that ended
        self._all_dropped = 0

    @contextmanager
    def of(self, keys: Sequence[bytes] | None) -> Iterator[None]:
        """These blocks, all for None, are dropped meanwhile."""
        dropping = None if keys is None else frozenset(keys)
        self._running.append(dropping)
        try:
            yield
        finally:
            self._running.remove(dropping)
            self.epoch += 1
            if dropping is None or len(self._dropped) + len(dropping) > MAX_REMEMBERED_BLOCKS:
                self._dropped.clear()
                self._all_dropped = self.epoch
            else:
                self._dropped.update(dict.fromkeys(dropping, self.epoch))

    def overtook(self, key: bytes, *, begun: int) -> bool:
        """Whether the block was dropped since that epoch, or is being dropped now."""
        if any(dropping is None or key in dropping for dropping in self._running):
            return True
        return max(self._all_dropped, self._dropped.get(key, 0)) > begun

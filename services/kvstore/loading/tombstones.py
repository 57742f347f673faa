"""Tombstones of dropped blocks, which running loads must respect. Pure.

A load that runs during a drop would publish the dropped block again. So each load remembers the epoch in
which it started, and checks the tombstones before it publishes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# With more tombstones, all blocks count as dropped, so that running loads are misses.
MAX_REMEMBERED_BLOCKS = 65_536


class Tombstones:
    """Blocks that are being dropped now, or were dropped recently."""

    def __init__(self) -> None:
        self.epoch = 0
        self._running: list[frozenset[bytes] | None] = []  # None: all blocks
        self._dropped: dict[bytes, int] = {}  # the epoch in which the drop ended
        self._all_dropped = 0

    @contextmanager
    def dropping(self, keys: Sequence[bytes] | None) -> Iterator[None]:
        """Mark these blocks (None: all) as dropped while the `with` block runs, and after it."""
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

    def covers(self, key: bytes, *, since_epoch: int) -> bool:
        """Whether the block is being dropped now, or was dropped after that epoch."""
        if any(dropping is None or key in dropping for dropping in self._running):
            return True
        return max(self._all_dropped, self._dropped.get(key, 0)) > since_epoch

"""Copies in the pool that nobody can use: those before them in their chain are nowhere any more. Pure.

The pool evicts what was used least lately, block by block, and knows no chains; its nodes do. Each node
looks after the blocks that it put. A copy whose predecessor is neither in the pool nor in a tier of this
node is an orphan; one that stays an orphan is dropped, so that the pool's memory is for blocks of use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

MAX_WATCHED_BLOCKS = 65_536
LOOK_BLOCKS = 4096
# Who lost the start of a chain puts it again with its next turn, most likely: so much patience.
GRACE_S = 60.0
DROP_BLOCKS = 64


class PoolOrphans:
    """The blocks that this node put, with the block before each. `is_usable`: a block is in the pool or in a
    tier of this node."""

    def __init__(self, *, is_pooled: Callable[[bytes], bool], is_usable: Callable[[bytes], bool]) -> None:
        self._is_pooled = is_pooled
        self._is_usable = is_usable
        self._before: OrderedDict[bytes, bytes] = OrderedDict()
        self._since_s: dict[bytes, float] = {}
        self.dropped_blocks = 0

    @property
    def blocks(self) -> int:
        """Orphans that are known now."""
        return len(self._since_s)

    def put(self, key: bytes, before: bytes) -> None:
        """This node put the block, which comes after `before` in its chain."""
        self._before[key] = before
        self._before.move_to_end(key, last=False)
        while len(self._before) > MAX_WATCHED_BLOCKS:
            self._forget(self._before.popitem()[0])

    def forget(self, keys: Sequence[bytes]) -> None:
        """These were dropped."""
        for key in keys:
            self._before.pop(key, None)
            self._since_s.pop(key, None)

    def clear(self) -> None:
        """Nobody knows now what the pool has: patience begins anew."""
        self._since_s.clear()

    def look(self, *, now_s: float) -> list[bytes]:
        """Look at some more of them, in turns; those to drop now, at most DROP_BLOCKS."""
        for _ in range(min(LOOK_BLOCKS, len(self._before))):
            key, before = self._before.popitem(last=False)
            if not self._is_pooled(key):
                self._forget(key)
                continue
            self._before[key] = before
            if self._is_usable(before):
                self._since_s.pop(key, None)
            else:
                self._since_s.setdefault(key, now_s)
        due = [key for key, since_s in self._since_s.items() if now_s - since_s >= GRACE_S]
        return [key for key in due[:DROP_BLOCKS] if not self._is_usable(self._before[key])]

    def dropped(self, keys: Sequence[bytes]) -> None:
        """These are gone from the pool."""
        self.dropped_blocks += len(keys)
        self.forget(keys)

    def _forget(self, key: bytes) -> None:
        self._since_s.pop(key, None)

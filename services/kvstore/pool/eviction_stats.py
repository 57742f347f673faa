"""Blocks that the pool evicted and that somebody wants then. Pure; times are given, in ms.

The pool evicts by itself. What is not there any more, though this node has not removed it, counts as evicted
from the moment this node learns of it: by the next list, or when it asks for the block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

MAX_REMEMBERED_BLOCKS = 65_536


class EvictionStats:
    """The last MAX_REMEMBERED_BLOCKS of them. Each counts once an eviction."""

    def __init__(self) -> None:
        self._left_ms: OrderedDict[bytes, float] = OrderedDict()
        self.wanted_blocks = 0
        self.wanted_gap_ms = 0.0  # the sum of the times between

    def left(self, keys: Iterable[bytes], *, now_ms: float) -> None:
        """These were evicted."""
        for key in keys:
            self._left_ms[key] = now_ms
            self._left_ms.move_to_end(key)
        while len(self._left_ms) > MAX_REMEMBERED_BLOCKS:
            self._left_ms.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """These are there again, or were removed."""
        if self._left_ms:
            for key in keys:
                self._left_ms.pop(key, None)

    def want(self, chain: Sequence[bytes], *, now_ms: float) -> None:
        """A request wanted the blocks of the chain."""
        if not self._left_ms:
            return
        for key in [key for key in chain if key in self._left_ms]:
            self.wanted_blocks += 1
            self.wanted_gap_ms += now_ms - self._left_ms.pop(key)

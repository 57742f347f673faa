"""Statistics of requests for blocks that the pool had evicted. Pure; times are in ms.

The pool does not report its evictions. A block that disappeared without a removal by this node counts as
evicted when the node notices: in the next list, or when a lookup misses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

MAX_REMEMBERED_BLOCKS = 65_536


class EvictionStats:
    """Remembers the last MAX_REMEMBERED_BLOCKS evictions. Each counts at most once as wanted."""

    def __init__(self) -> None:
        self._evicted_ms: OrderedDict[bytes, float] = OrderedDict()
        self.wanted_blocks = 0
        self.wanted_gap_ms = 0.0  # sum of the times between eviction and request

    def record_evicted(self, keys: Iterable[bytes], *, now_ms: float) -> None:
        """Record the eviction of these blocks."""
        for key in keys:
            self._evicted_ms[key] = now_ms
            self._evicted_ms.move_to_end(key)
        while len(self._evicted_ms) > MAX_REMEMBERED_BLOCKS:
            self._evicted_ms.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove blocks that the pool has again or that this node removed."""
        if self._evicted_ms:
            for key in keys:
                self._evicted_ms.pop(key, None)

    def record_request(self, chain: Sequence[bytes], *, now_ms: float) -> None:
        """Record a request for the blocks of the chain."""
        if not self._evicted_ms:
            return
        for key in [key for key in chain if key in self._evicted_ms]:
            self.wanted_blocks += 1
            self.wanted_gap_ms += now_ms - self._evicted_ms.pop(key)

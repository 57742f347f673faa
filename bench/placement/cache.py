"""Caches of the placement simulation, and what a cache common to all would be worth."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from bench.placement.trace import BLOCK_TOKENS, TraceRequest


class LruCache:
    """Blocks by hash, the least recently used first to go. Not thread-safe."""

    def __init__(self, n_blocks: int) -> None:
        self._n_blocks = n_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def prefix_blocks(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are held."""
        return len(list(takewhile(self._blocks.__contains__, hashes)))

    def put(self, hashes: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """All of these were used; returns (new, evicted). The end of a prefix goes before its start."""
        new = []
        for block in reversed(hashes):
            if block not in self._blocks:
                new.append(block)
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        evicted = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._n_blocks)]
        return new[::-1], evicted

    def give_up_first(self, hashes: Sequence[bytes]) -> None:
        """These are the next ones to be evicted, the end of a prefix before its start."""
        for block in hashes:
            if block in self._blocks:
                self._blocks.move_to_end(block, last=False)


def shared_cache_share(requests: Sequence[TraceRequest], n_blocks: int) -> float:
    """The share of prompt tokens that one cache of this size, common to all, would hold when asked."""
    cache = LruCache(n_blocks)
    cached = total = 0
    for request in requests:
        cached += cache.prefix_blocks(request.hashes) * BLOCK_TOKENS
        total += request.prompt_tokens
        cache.put(request.hashes)
    return cached / max(total, 1)

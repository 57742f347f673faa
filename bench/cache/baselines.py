"""Caches to compare with, over chains of blocks: LRU, S3-FIFO, ARC, the clairvoyant optimum, no limit. Pure.

All take whole chains and answer how many leading blocks they had: a block without those before it is of no
use. LRU treats a chain from its end, so that its start is the most recent. S3-FIFO: Yang et al., SOSP 2023.
ARC: Megiddo and Modha, FAST 2003. The optimum is Belady's: what is wanted latest goes, and what is wanted
never again is not kept; a block is never wanted later than those behind it, so chains end first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol

NEVER = 1 << 60


class Cache(Protocol):
    """Answers chain after chain."""

    def serve(self, chain: Sequence[int]) -> int:
        """Leading blocks that were there; all of the chain's blocks are offered then."""


def leading(chain: Sequence[int], held: Collection[int]) -> int:
    """How many leading blocks of the chain are held."""
    for at, block in enumerate(chain):
        if block not in held:
            return at
    return len(chain)


class Unlimited:
    """Keeps everything."""

    def __init__(self) -> None:
        self._held: set[int] = set()

    def serve(self, chain: Sequence[int]) -> int:
        hits = leading(chain, self._held)
        self._held.update(chain)
        return hits


class Lru:
    """Least recently used."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._order: OrderedDict[int, None] = OrderedDict()

    def serve(self, chain: Sequence[int]) -> int:
        order = self._order
        hits = leading(chain, order)
        for block in reversed(chain):
            order[block] = None
            order.move_to_end(block)
            if len(order) > self._capacity:
                order.popitem(last=False)
        return hits


class S3Fifo:
    """Small queue of a tenth, main queue, ghosts; counters up to 3."""

    def __init__(self, capacity: int) -> None:
        self._small_blocks = max(1, capacity // 10)
        self._capacity = capacity
        self._small: OrderedDict[int, int] = OrderedDict()  # block: times used since it came
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def serve(self, chain: Sequence[int]) -> int:
        hits = 0
        going_on = True
        for block in chain:
            queue = self._small if block in self._small else self._main if block in self._main else None
            if queue is None:
                going_on = False
            else:
                queue[block] = min(queue[block] + 1, 3)
                hits += going_on
        for block in reversed(chain):
            if block not in self._small and block not in self._main:
                self._insert(block)
        return hits

    def _insert(self, block: int) -> None:
        while len(self._small) + len(self._main) >= self._capacity:
            self._evict()
        if block in self._ghosts:
            del self._ghosts[block]
            self._main[block] = 0
        else:
            self._small[block] = 0

    def _evict(self) -> None:
        if len(self._small) >= self._small_blocks or not self._main:
            block, used = self._small.popitem(last=False)
            if used > 1:
                self._main[block] = 0
            else:
                self._ghosts[block] = None
                if len(self._ghosts) > self._capacity:
                    self._ghosts.popitem(last=False)
            return
        block, used = self._main.popitem(last=False)
        if used:
            self._main[block] = used - 1


class Arc:
    """Adaptive replacement: recent (t1) and frequent (t2) with their ghosts (b1, b2)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._t1, self._t2, self._b1, self._b2 = (OrderedDict[int, None]() for _ in range(4))

    def serve(self, chain: Sequence[int]) -> int:
        hits = 0
        for block in chain:
            if block not in self._t1 and block not in self._t2:
                break
            hits += 1
        for block in reversed(chain):
            self._use(block)
        return hits

    def _use(self, block: int) -> None:
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        if block in t1 or block in t2:
            t1.pop(block, None)
            t2.pop(block, None)
        elif block in b1:
            self._target = min(self._capacity, self._target + max(1.0, len(b2) / len(b1)))
            self._replace(in_b2=False)
            del b1[block]
        elif block in b2:
            self._target = max(0.0, self._target - max(1.0, len(b1) / len(b2)))
            self._replace(in_b2=True)
            del b2[block]
        else:
            self._take_new(block)
            return
        t2[block] = None

    def _take_new(self, block: int) -> None:
        known = len(self._t1) + len(self._b1)
        total = known + len(self._t2) + len(self._b2)
        if known >= self._capacity:
            if len(self._t1) < self._capacity:
                self._b1.popitem(last=False)
                self._replace(in_b2=False)
            else:
                self._t1.popitem(last=False)
        elif total >= self._capacity:
            if total >= 2 * self._capacity:
                self._b2.popitem(last=False)
            self._replace(in_b2=False)
        self._t1[block] = None

    def _replace(self, *, in_b2: bool) -> None:
        if len(self._t1) + len(self._t2) < self._capacity:
            return
        many = len(self._t1) > self._target or (in_b2 and len(self._t1) == int(self._target))
        if self._t1 and (many or not self._t2):
            self._b1[self._t1.popitem(last=False)[0]] = None
        else:
            self._b2[self._t2.popitem(last=False)[0]] = None


class Clairvoyant:
    """Knows all chains to come, in the order in which they are served."""

    def __init__(self, capacity: int, chains: Sequence[Sequence[int]]) -> None:
        self._capacity = capacity
        self._next = _next_wants(chains)
        self._served = 0
        self._held: dict[int, int] = {}  # block: when it is wanted next
        self._latest: list[tuple[int, int, int]] = []

    def serve(self, chain: Sequence[int]) -> int:
        hits = leading(chain, self._held)
        wanted = self._next[self._served]
        self._served += 1
        for depth, (block, at) in enumerate(zip(chain, wanted, strict=True)):
            if at == NEVER:
                self._held.pop(block, None)
                continue
            self._held[block] = at
            heapq.heappush(self._latest, (-at, -depth, block))
        while len(self._held) > self._capacity:
            at, _, block = heapq.heappop(self._latest)
            if self._held.get(block) == -at:
                del self._held[block]
        return hits


def _next_wants(chains: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each block of each chain, which chain wants it next."""
    upcoming: dict[int, int] = {}
    wants: list[list[int]] = []
    for number in range(len(chains) - 1, -1, -1):
        wants.append([upcoming.get(block, NEVER) for block in chains[number]])
        upcoming.update(dict.fromkeys(chains[number], number))
    wants.reverse()
    return wants

"""Which of several simulated caches the tier follows. Pure.

The hits of all are summed, of which older ones count less. The tier follows the cache with the most hits. A
difference smaller than chance makes it changes nothing: chance is the root of the sum of the squared
differences of single requests. LRU, the first cache, is the floor: another one must lead it by a part of all
blocks, because a smaller lead is not worth the risk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LRU = 0
# After so many capacities of wanted blocks, and not before so many blocks, a hit counts half.
HALF_LIFE_CAPACITIES = 64
MIN_HALF_LIFE_BLOCKS = 65_536
# The lead at which another cache is followed: in standard deviations, and in blocks.
DEVIATIONS = 0.75
MIN_LEAD_BLOCKS = 8.0
# The lead over LRU at which it is left: in standard deviations, and as a part of all blocks.
LRU_DEVIATIONS = 0.5
LRU_LEAD_PART = 0.0015
_MAX_WEIGHT = 1e9


class PolicySelector:
    """Compares the hits of the simulated caches."""

    def __init__(self, n_policies: int, capacity_blocks: int) -> None:
        self.leader = LRU
        self.changes = 0
        self.is_pinned = False  # the leader stays
        self._weight = 1.0  # of the next hits: it grows, so that the sums need not decay
        self._blocks = 0.0
        self._hits = [0.0] * n_policies
        self._squares = [[0.0] * n_policies for _ in range(n_policies)]  # of the differences of two
        self.resize(capacity_blocks)

    def resize(self, capacity_blocks: int) -> None:
        """Judge by the half-life of this capacity from now on."""
        self._half_life = max(MIN_HALF_LIFE_BLOCKS, HALF_LIFE_CAPACITIES * capacity_blocks)

    def judge(self, hits: Sequence[int], n_blocks: int) -> int | None:
        """The policy to follow from now on, if it is another one. `hits`: those of a chain of `n_blocks`."""
        self._weight *= 2.0 ** (n_blocks / self._half_life)
        self._blocks += self._weight * n_blocks
        if min(hits) == max(hits):
            return None  # sums of equal hits decide nothing
        self._add(hits)
        chosen = self._choose()
        if chosen == self.leader or self.is_pinned:
            return None
        self.leader = chosen
        self.changes += 1
        return chosen

    def _choose(self) -> int:
        sums, leader = self._hits, self.leader
        best = max(range(len(sums)), key=sums.__getitem__)
        deviation = math.sqrt(self._squares[leader][best])
        if leader == LRU:
            least = max(LRU_DEVIATIONS * deviation, LRU_LEAD_PART * self._blocks)
        else:
            least = DEVIATIONS * deviation
        return best if sums[best] - sums[leader] > least + MIN_LEAD_BLOCKS * self._weight else leader

    def _add(self, hits: Sequence[int]) -> None:
        if self._weight > _MAX_WEIGHT:
            self._scale(1.0 / self._weight)
        weight = self._weight
        for number, found in enumerate(hits):
            self._hits[number] += weight * found
            row = self._squares[number]
            for other, others_found in enumerate(hits):
                row[other] += (weight * (found - others_found)) ** 2

    def _scale(self, factor: float) -> None:
        self._weight *= factor
        self._blocks *= factor
        self._hits = [total * factor for total in self._hits]
        self._squares = [[square * factor * factor for square in row] for row in self._squares]

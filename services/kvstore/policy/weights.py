"""How much each of several simulated caches counts: the more, the more hits it has. Pure.

Multiplicative weights (Hedge: Freund and Schapire, JCSS 1997). A cache that lacks one standard deviation of
the difference to the best one counts 1/e of its start. The deviation is the root of the sum of the squared
differences of single requests. So chance changes little and a clear lead decides within few requests. Older
hits count less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# A hit counts half after this many capacities of wanted blocks, and not before MIN_HALF_LIFE_BLOCKS.
HALF_LIFE_CAPACITIES = 64
MIN_HALF_LIFE_BLOCKS = 65_536
# Added to the deviation: the first hits that differ decide less.
MIN_DEVIATION_BLOCKS = 0.5
# Another policy leads when it weighs this many times as much as the leader.
LEADER_RATIO = math.e
_MAX_SCALE = 1e9


class PolicyWeights:
    """Weighs the simulated caches by their hits."""

    def __init__(self, start: Sequence[float], capacity_blocks: int) -> None:
        """`start`: the weights of caches with equal hits."""
        n = len(start)
        self.values = list(start)
        self.leader = max(range(n), key=start.__getitem__)
        self.changes = 0  # of the leader
        self._start = tuple(start)
        self._is_fixed = False
        self._scale = 1.0  # of the next hits: it grows, so that the sums need not decay
        self._hits = [0.0] * n
        self._squares = [[0.0] * n for _ in range(n)]  # of the differences of two
        self.resize(capacity_blocks)

    def resize(self, capacity_blocks: int) -> None:
        """Judge by the half-life of this capacity from now on."""
        self._half_life = max(MIN_HALF_LIFE_BLOCKS, HALF_LIFE_CAPACITIES * capacity_blocks)

    def fix_policy(self, number: int) -> None:
        """Only the cache of that number counts, for ever."""
        self.values = [float(number == other) for other in range(len(self._start))]
        self.leader, self._is_fixed = number, True

    def judge(self, hits: Sequence[int], n_blocks: int) -> bool:
        """Weigh again with the hits of a chain of `n_blocks`; whether a weight may differ."""
        self._scale *= 2.0 ** (n_blocks / self._half_life)
        if self._is_fixed or min(hits) == max(hits):
            return False  # sums of equal hits decide nothing
        self._add(hits)
        sums = self._hits
        best = max(range(len(sums)), key=sums.__getitem__)
        least, squares = MIN_DEVIATION_BLOCKS * self._scale, self._squares[best]
        self.values = [
            start * math.exp((total - sums[best]) / (math.sqrt(square) + least))
            for start, total, square in zip(self._start, sums, squares, strict=True)
        ]
        heaviest = max(range(len(sums)), key=self.values.__getitem__)
        if self.values[heaviest] > LEADER_RATIO * self.values[self.leader]:
            self.leader = heaviest
            self.changes += 1
        return True

    def _add(self, hits: Sequence[int]) -> None:
        if self._scale > _MAX_SCALE:
            factor, self._scale = 1.0 / self._scale, 1.0
            self._hits = [total * factor for total in self._hits]
            self._squares = [[square * factor * factor for square in row] for row in self._squares]
        scale = self._scale
        for number, found in enumerate(hits):
            self._hits[number] += scale * found
            row = self._squares[number]
            for other, others_found in enumerate(hits):
                row[other] += (scale * (found - others_found)) ** 2

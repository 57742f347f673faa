"""Two simulated caches of one capacity, over the runs of one tree: what LRU would hold, and what the
reuse model would. They hold leading parts of runs and count blocks; nothing else is in them. Pure.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.kvstore.policy.reuse import ReuseModel, bins_of
from services.kvstore.policy.runs import Run, RunTree

Dropped = tuple[Run, int, int]  # blocks [first, end) of the run


class Expert(Protocol):
    """A simulated cache. `total` blocks are in it."""

    total: int

    def count(self, run: Run) -> int:
        """Leading blocks of the run that it holds."""

    def touch(self, path: Sequence[Run]) -> None:
        """The runs of one chain were wanted, in its order."""

    def grow(self, run: Run, n_blocks: int) -> None:
        """Hold at least so many of the run's leading blocks."""

    def shrink(self, n_blocks: int) -> list[Dropped]:
        """Let go of so many blocks, the least worth first; fewer when there are not so many."""

    def cut(self, run: Run, n_blocks: int) -> None:
        """Hold at most so many of the run's leading blocks."""


class LruExpert:
    """Least recently wanted first, within one chain its end first."""

    def __init__(self, tree: RunTree) -> None:
        self.total = 0
        self._order = tree.lru_order

    def count(self, run: Run) -> int:
        return run.lru

    def touch(self, path: Sequence[Run]) -> None:
        order = self._order
        for run in reversed(path):
            order[run] = None  # also when nothing of it is held: it is about to be
            order.move_to_end(run)

    def grow(self, run: Run, n_blocks: int) -> None:
        if n_blocks > run.lru:
            self.total += n_blocks - run.lru
            run.lru = n_blocks
            self._order.setdefault(run)

    def shrink(self, n_blocks: int) -> list[Dropped]:
        dropped: list[Dropped] = []
        while n_blocks > 0 and self._order:
            run = next(iter(self._order))
            taken = min(run.lru, n_blocks)
            run.lru -= taken
            self.total -= taken
            n_blocks -= taken
            if taken:
                dropped.append((run, run.lru, run.lru + taken))
            if not run.lru:
                del self._order[run]
        return dropped

    def cut(self, run: Run, n_blocks: int) -> None:
        if run.lru > n_blocks:
            self.total -= run.lru - n_blocks
            run.lru = n_blocks
            if not n_blocks:
                self._order.pop(run, None)


class ReuseExpert:
    """Least value first, and only from the ends of chains."""

    def __init__(self, tree: RunTree, model: ReuseModel, *, cost_slope: float) -> None:
        """`cost_slope`: what each block before it adds to the cost of computing a block, as a part."""
        self.total = 0
        self._tree = tree
        self._model = model
        self._cost_slope = cost_slope
        self._heap: list[tuple[float, int, int, int]] = []  # value, last, row, stamp
        self._limit = float("inf")  # of the values in the heap when it was built; beyond, it is not complete
        self._dropped_since = 0

    def count(self, run: Run) -> int:
        return run.kept

    def touch(self, path: Sequence[Run]) -> None:
        for run in path:
            run.stamp += 1
            if run.kept and not run.kept_children:
                self._push(run)

    def grow(self, run: Run, n_blocks: int) -> None:
        if n_blocks <= run.kept:
            return
        first = not run.kept
        self.total += n_blocks - run.kept
        self._set(run, n_blocks)
        if first:
            if run.parent is not None:
                self._count_child(run.parent, 1)
            if not run.kept_children:
                self._push(run)

    def shrink(self, n_blocks: int) -> list[Dropped]:
        dropped: list[Dropped] = []
        if self._dropped_since > max(16, self.total // 32):
            self.rank()
        while n_blocks > 0 and self.total:
            run = self._least()
            taken = min(run.kept, n_blocks)
            n_blocks -= taken
            self._dropped_since += taken
            dropped.append((run, run.kept - taken, run.kept))
            self.cut(run, run.kept - taken)
        return dropped

    def cut(self, run: Run, n_blocks: int) -> None:
        if run.kept <= n_blocks:
            return
        self.total -= run.kept - n_blocks
        self._set(run, n_blocks)
        if not n_blocks and run.parent is not None:
            self._count_child(run.parent, -1)

    def rank(self) -> None:
        """Put the ends of chains in order as of now: the least of them, what is beyond them later."""
        columns = self._tree.columns
        kept, kept_children = _shared(columns.kept), _shared(columns.kept_children)
        rows = np.flatnonzero((kept > 0) & (kept_children == 0))
        last, kind = _shared(columns.last)[rows], _shared(columns.kind)[rows]
        depth = _shared(columns.depth)[rows]
        now = self._tree.now
        values = self._model.values[kind, bins_of(now - last)] * (1.0 + self._cost_slope * depth)
        wanted = max(64, len(rows) // 8)
        self._limit = float("inf")
        if len(rows) > wanted:
            least = np.argpartition(values, wanted)
            self._limit = float(values[least[wanted]])
            chosen = least[:wanted]
            rows, values, last = rows[chosen], values[chosen], last[chosen]
        runs = columns.runs
        self._heap = [
            (value, at, row, run.stamp)
            for value, at, row in zip(values.tolist(), last.tolist(), rows.tolist(), strict=True)
            if (run := runs[row]) is not None
        ]
        heapq.heapify(self._heap)
        self._dropped_since = 0

    def _least(self) -> Run:
        """The end of a chain that is worth least; there is one."""
        while True:
            while self._heap:
                value, _, row, stamp = self._heap[0]
                run = self._tree.columns.runs[row]
                if run is not None and run.stamp == stamp and run.kept and not run.kept_children:
                    if value <= self._limit:
                        return run
                    break
                heapq.heappop(self._heap)
            self.rank()

    def _push(self, run: Run) -> None:
        kind = self._tree.columns.kind[run.index]
        value = self._model.value_of(kind, self._tree.now - run.last) * (1.0 + self._cost_slope * run.depth)
        heapq.heappush(self._heap, (value, run.last, run.index, run.stamp))

    def _set(self, run: Run, n_blocks: int) -> None:
        run.kept = n_blocks
        self._tree.columns.kept[run.index] = n_blocks

    def _count_child(self, parent: Run, by: int) -> None:
        parent.kept_children += by
        self._tree.columns.kept_children[parent.index] = parent.kept_children
        if by < 0 and parent.kept and not parent.kept_children:
            self._push(parent)


def _shared(column: array[int]) -> npt.NDArray[np.int64]:
    """The column itself and no copy; it must not grow while this is there."""
    return np.asarray(memoryview(column), np.int64)

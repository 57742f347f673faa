"""Which block of a disk goes next: the least worth of a sample of blocks that end their chains. Pure.

A block is of no use without those before it, so each knows the block before it and counts those after it.
Only one that has none after it goes. When it went the one before it may be next, if it is not worth more than
the others that were chosen. On a disk of up to SAMPLE_ROWS slots the sample is all of them.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from services.kvstore.disk.table.index import IndexColumns
from services.kvstore.disk.table.policy import DiskPolicy

SAMPLE_ROWS = 4096
SAMPLE_STRETCH = 16
# Of the ends of chains in a sample, this part goes before another is drawn.
_SAMPLE_PART = 8
_TRIES = 8

Rows = npt.NDArray[np.int64]


class ChainLinks:
    """Before which block of its chain each row stands. Rows of blocks that are there only."""

    def __init__(self, columns: IndexColumns) -> None:
        self._columns = columns

    def link(self, rows: Rows) -> None:
        """Rows of a chain's neighbours, -1 where a block is not there. The first link of a block stays, and a
        link leads to a lesser depth, so that there is no circle."""
        columns = self._columns
        before, after = rows[:-1], rows[1:]
        both = (before >= 0) & (after >= 0)
        before, after = before[both], after[both]
        new = (columns.parent[after] == 0) & (columns.depth[before] < columns.depth[after])
        before, after = before[new], after[new]
        after, first = np.unique(after, return_index=True)
        before = before[first]
        columns.parent[after] = before + 1
        np.add.at(columns.children, before, 1)

    def link_one(self, before: int, after: int) -> None:
        """Link two rows."""
        cells = self._columns.cells
        if not cells.parent[after] and cells.depth[before] < cells.depth[after]:
            cells.parent[after] = before + 1
            cells.children[before] += 1

    def after(self, rows: Rows) -> Rows:
        """The rows that come after any of these in their chains."""
        columns = self._columns
        if not columns.children[rows].any():
            return np.zeros(0, np.int64)
        found: Rows = np.flatnonzero(np.isin(columns.parent, rows + 1))
        return found

    def cut(self, row: int) -> int:
        """The block in that row goes; returns the row before it, -1 when there is none."""
        columns, cells = self._columns, self._columns.cells
        before: int = cells.parent[row] - 1
        if before >= 0:
            cells.parent[row] = 0
            cells.children[before] -= 1
        if cells.children[row]:
            columns.parent[columns.parent == row + 1] = 0
            cells.children[row] = 0
        return before

    def cut_all(self, rows: Rows) -> None:
        """All of these go; quicker than one by one."""
        columns = self._columns
        np.subtract.at(
            columns.children, columns.parent[rows[columns.parent[rows] > 0]].astype(np.int64) - 1, 1
        )
        columns.parent[rows] = 0
        after = np.isin(columns.parent, rows + 1)
        columns.parent[after] = 0
        columns.children[rows] = 0


class Evictor:
    """Victims of one kind, one after the other: the blocks of one slot size, or of one tenant."""

    def __init__(
        self,
        columns: IndexColumns,
        holds: Collection[int],
        *,
        belongs: Callable[[Rows], npt.NDArray[np.bool_]],
        rng: random.Random,
        all_rows: bool = False,
    ) -> None:
        """`holds`: rows that must stay. `belongs`: which rows are of this kind. `all_rows`: look at every row
        and not at a sample, because few are."""
        self._columns = columns
        self._holds = holds
        self._belongs = belongs
        self._all_rows = all_rows
        self._rng = np.random.default_rng(rng.getrandbits(64))
        self._heap: list[tuple[float, int, int, int]] = []  # value, place in the sample, used, row
        self._limit = 0.0
        self._changes = 0  # of the policy, when `_heap` was built
        self._inner = False  # the ends of all chains are held; what is before them may go

    def next(self, policy: DiskPolicy, now: int) -> int:
        """The row that goes next, -1 when none may. The caller drops it, then calls `freed`."""
        if self._changes != policy.changes:
            self._heap.clear()  # values of another policy
        for _ in range(2):
            while self._heap:
                _, _, used, row = heapq.heappop(self._heap)
                if self._may_go(row) and self._columns.cells.used[row] == used:
                    return row
            self._choose(policy, now)
        return -1

    def freed(self, before: int, policy: DiskPolicy, now: int) -> None:
        """A victim went, and the row before it in its chain may be an end now."""
        if before < 0 or not self._may_go(before):
            return
        cells = self._columns.cells
        used = cells.used[before]
        value = policy.value(cells.kind[before], max(0, now - used))
        if value <= self._limit and self._belongs(np.array([before], np.int64))[0]:
            heapq.heappush(self._heap, (value, -1, used, before))

    def _may_go(self, row: int) -> bool:
        cells = self._columns.cells
        ends = self._inner or not cells.children[row]
        return ends and bool(cells.published[row]) and row not in self._holds

    def _choose(self, policy: DiskPolicy, now: int) -> None:
        rows = self._ends()
        if not rows.size:
            return
        values, used = self._values(rows, policy, now), self._columns.used[rows]
        order = np.lexsort((self._columns.generation[rows], used, values))[
            : max(1, len(rows) // _SAMPLE_PART)
        ]
        self._limit = float(values[order[-1]])
        self._heap = list(
            zip(
                values[order].tolist(),
                range(len(order)),
                used[order].tolist(),
                rows[order].tolist(),
                strict=True,
            )
        )  # in order, which is a heap
        self._changes = policy.changes

    def _ends(self) -> Rows:
        """Rows of a sample that end their chains; when there are none, such as do not."""
        columns, n_rows = self._columns, self._columns.n_rows
        rows: Rows = np.zeros(0, np.int64)
        self._inner = False
        for _ in range(_TRIES):
            whole = self._all_rows or n_rows <= SAMPLE_ROWS
            rows = np.arange(n_rows) if whole else self._stretches(n_rows)
            rows = rows[columns.published[rows]]
            rows = rows[self._belongs(rows)]
            if self._holds:
                rows = np.setdiff1d(rows, list(self._holds), assume_unique=True)
            ends: Rows = rows[columns.children[rows] == 0]
            if ends.size:
                return ends
            if whole:
                break
        self._inner = True
        return rows

    def _stretches(self, n_rows: int) -> Rows:
        """A sample in stretches of rows that lie together. Blocks that were written together go together, and
        what is written in their places lies together again, in few files to sync."""
        stretches = self._rng.choice(
            -(-n_rows // SAMPLE_STRETCH), SAMPLE_ROWS // SAMPLE_STRETCH, replace=False, shuffle=False
        )
        rows: Rows = (np.sort(stretches)[:, None] * SAMPLE_STRETCH + np.arange(SAMPLE_STRETCH)).ravel()
        return rows[rows < n_rows]

    def _values(self, rows: Rows, policy: DiskPolicy, now: int) -> npt.NDArray[np.float64]:
        columns = self._columns
        ages = np.maximum(now - columns.used[rows], 0)
        return policy.values(columns.kind[rows], ages)

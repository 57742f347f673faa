"""Chains of blocks as a tree of runs: what the eviction policy remembers of blocks, held or not. Pure.

A run is a stretch of a chain whose blocks have always been wanted together; it is split where a later
chain leaves it. Costs of a wanted chain follow its runs, not its blocks, but for one comparison of keys.

    [system prompt] -- [tools of tenant] -- [turn 1] -- [turn 2, body] -- [turn 2, last block]
                                        \\-- [turn 1 of another session]

`lru` and `kept` count the leading blocks of the run that the two simulated caches hold, `present` those
that are really there; a leading part is all that can be used, so a number is enough.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence


class Run:
    """Blocks `keys` from block `depth` of the chain on. `index` is its place in the table's columns."""

    __slots__ = (
        "children",
        "depth",
        "evicted",
        "evicted_ms",
        "frequency",
        "gap",
        "gone",
        "index",
        "kept",
        "kept_children",
        "keys",
        "last",
        "lru",
        "parent",
        "present",
        "session",
        "stamp",
        "tenant",
    )  # fmt: skip

    def __init__(self, keys: list[bytes], *, parent: Run | None, depth: int, index: int) -> None:
        self.keys = keys
        self.parent = parent
        self.depth = depth
        self.index = index
        self.children = 0
        self.kept_children = 0
        self.frequency = 0  # times wanted
        self.last = 0  # time of the last want, in wanted blocks
        self.gap = 0  # between the last two wants; 0 before the second
        self.session = 0  # what it was when new: see policy_reuse.session_kind
        self.lru = 0
        self.kept = 0
        self.present = 0
        self.evicted = 0  # of its blocks, since it was last wanted
        self.evicted_ms = 0.0
        self.stamp = 0  # entries in heaps with another stamp are stale
        self.tenant = 0
        self.gone = False


class Columns:
    """Numbers of all runs, side by side for numpy: one row a run, `kept` 0 and `n` 0 for free rows."""

    def __init__(self) -> None:
        self.last = array("q")
        self.kind = array("l")
        self.kept = array("l")
        self.kept_children = array("l")
        self.depth = array("l")
        self.n = array("l")
        self.tenant = array("l")
        self.runs: list[Run | None] = []
        self._free: list[int] = []

    def add(self) -> int:
        """A row of zeros."""
        if self._free:
            return self._free.pop()
        for column in (self.last, self.kind, self.kept, self.kept_children, self.depth, self.n, self.tenant):
            column.append(0)
        self.runs.append(None)
        return len(self.runs) - 1

    def remove(self, row: int) -> None:
        """The row may be used again."""
        self.kept[row] = self.kept_children[row] = self.n[row] = 0
        self.runs[row] = None
        self._free.append(row)


class RunTree:
    """All runs, by the keys of their blocks, and in the order in which they were last wanted."""

    def __init__(self) -> None:
        self.columns = Columns()
        self.recency: OrderedDict[Run, None] = OrderedDict()  # longest not wanted first
        self.lru_order: OrderedDict[Run, None] = OrderedDict()  # those with `lru` > 0, the same order
        self.now = 0  # wanted blocks so far
        self._runs: dict[bytes, Run] = {}

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._runs)

    def get(self, key: bytes) -> Run | None:
        """The run that has the block."""
        return self._runs.get(key)

    def walk(self, chain: Sequence[bytes]) -> list[Run]:
        """The runs that make up the chain, in its order; split so that they end within it, new where
        nothing was known. A block that is met in a second place stays where it was first."""
        path: list[Run] = []
        seen: set[Run] = set()
        at, n = 0, len(chain)
        parent: Run | None = None
        while at < n:
            run = self._runs.get(chain[at])
            if run is None:
                run = self._grow(chain, at, parent)
                taken = len(run.keys)
            elif run in seen:  # a block twice in one chain
                at += 1
                continue
            else:
                if run.keys[0] != chain[at]:
                    self.split(run, run.keys.index(chain[at]))
                if run.parent is None and parent is not None and not _is_ancestor(run, parent):
                    self._adopt(parent, run)
                taken = _common(run.keys, chain, at)
                if taken < len(run.keys):
                    run = self.split(run, taken)
            seen.add(run)
            path.append(run)
            parent = run
            at += taken
        return path

    def begin(self, key: bytes) -> Run:
        """A run of its own for a block that is not known, as `walk` gives it."""
        return self._new([key], None, 0)

    def split(self, run: Run, at: int) -> Run:
        """Cut the run before its block `at`; returns the new first part. `run` stays the second one."""
        upper = self._new(run.keys[:at], run.parent, run.depth)
        columns = self.columns
        upper.frequency, upper.last, upper.gap = run.frequency, run.last, run.gap
        upper.session, upper.tenant = run.session, run.tenant
        columns.last[upper.index] = run.last
        columns.kind[upper.index] = columns.kind[run.index]
        columns.tenant[upper.index] = run.tenant
        upper.lru, run.lru = min(run.lru, at), max(run.lru - at, 0)
        run.evicted, upper.evicted = (
            min(run.evicted, len(run.keys) - at),
            max(run.evicted + at - len(run.keys), 0),
        )
        upper.evicted_ms = run.evicted_ms
        upper.present, run.present = min(run.present, at), max(run.present - at, 0)
        upper.kept, run.kept = min(run.kept, at), max(run.kept - at, 0)
        upper.children, upper.kept_children = 1, int(run.kept > 0)
        del run.keys[:at]
        run.depth += at
        run.parent = upper
        columns.depth[run.index] = run.depth
        columns.n[run.index] = len(run.keys)
        for part in (upper, run):
            columns.kept[part.index] = part.kept
            columns.kept_children[part.index] = part.kept_children
        if upper.lru:
            self.lru_order[upper] = None
        if not run.lru:
            self.lru_order.pop(run, None)
        return upper

    def forget(self, run: Run) -> None:
        """The run is no longer remembered; none of its blocks may be held, nor any of its children."""
        for key in run.keys:
            if self._runs.get(key) is run:
                del self._runs[key]
        if run.parent is not None:
            run.parent.children -= 1
        run.gone = True
        run.stamp += 1
        self.recency.pop(run, None)
        self.lru_order.pop(run, None)
        self.columns.remove(run.index)

    def oldest(self) -> Iterator[Run]:
        """Longest not wanted first; not to be changed meanwhile."""
        return iter(self.recency)

    def _grow(self, chain: Sequence[bytes], at: int, parent: Run | None) -> Run:
        """A new run of the blocks from `at` on that nobody knows."""
        keys: list[bytes] = []
        known = self._runs
        fresh: set[bytes] = set()
        for key in chain[at:]:
            if key in known or key in fresh:
                break
            keys.append(key)
            fresh.add(key)
        if len(keys) > 1 and at + len(keys) == len(chain):
            keys.pop()  # the chain's last block is a run of its own: it comes back less often
        run = self._new(keys, parent, at)
        if parent is not None:
            parent.children += 1
        return run

    def _new(self, keys: list[bytes], parent: Run | None, depth: int) -> Run:
        index = self.columns.add()
        run = Run(keys, parent=parent, depth=depth, index=index)
        self.columns.runs[index] = run
        self.columns.n[index] = len(keys)
        self.columns.depth[index] = depth
        self._runs.update(dict.fromkeys(keys, run))
        self.recency[run] = None
        return run

    def _adopt(self, parent: Run, run: Run) -> None:
        run.parent = parent
        parent.children += 1
        if run.kept:
            parent.kept_children += 1
            self.columns.kept_children[parent.index] = parent.kept_children


def _common(keys: Sequence[bytes], chain: Sequence[bytes], at: int) -> int:
    """How many of `keys` the chain has from `at` on; at least 1 is known to be equal."""
    limit = min(len(keys), len(chain) - at)
    if keys[:limit] == chain[at : at + limit]:
        return limit
    return next(i for i in range(limit) if keys[i] != chain[at + i])


def _is_ancestor(run: Run, below: Run | None) -> bool:
    while below is not None:
        if below is run:
            return True
        below = below.parent
    return False

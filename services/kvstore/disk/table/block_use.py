"""The use of the blocks in a disk's table: chains, policy, quota, and which goes next. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from services.kvstore.disk.table.block import Slab
from services.kvstore.disk.table.evict import ChainLinks, Evictor, Rows
from services.kvstore.disk.table.index import DiskIndex, IndexColumns
from services.kvstore.disk.table.policy import NO_KIND, BlockOrigin, DiskPolicy
from services.kvstore.disk.table.quota import DiskQuota
from services.kvstore.policy.history import FIRST_WANT

MAX_DEPTH = 0xFFFF
SAMPLED_BLOCKS = 4096


class BlockUse:
    """The use of the blocks in one table's columns. The table reports each block that it gains or loses."""

    def __init__(
        self,
        columns: IndexColumns,
        index: DiskIndex,
        slabs: Sequence[Slab],
        holds: Collection[int],
        *,
        quota: DiskQuota | None,
        rng: random.Random,
    ) -> None:
        self.policy: DiskPolicy | None = None  # from the first use on
        self._n_slots = self._n_uncut = 0
        self.tick = 0  # wanted blocks so far
        self._columns = columns
        self._index = index
        self._slabs = slabs
        self._holds = holds
        self._quota = quota
        self._rng = rng
        self._links = ChainLinks(columns)
        self._evictors: dict[int, Evictor] = {}  # by slot size
        self._tenant_evictors: dict[int, Evictor] = {}
        # Called with each block of a chain behind one that goes from this disk, and with the one before it.
        self.on_cut: Callable[[bytes, bytes], None] = lambda key, before: None

    @property
    def memory_bytes(self) -> int:
        """About what the policy takes, in bytes."""
        return self.policy.memory_bytes if self.policy is not None else 0

    def resize(self, n_slots: int, n_uncut: int) -> None:
        """A slab was cut into `n_slots`; `n_uncut` slabs have no slots yet."""
        self._n_slots, self._n_uncut = n_slots, n_uncut
        if self.policy is not None:
            self.policy.resize(self._capacity())

    def restored(self) -> None:
        """The index is that of a start: blocks of which nothing else is known, the oldest first."""
        columns = self._columns
        rows = np.flatnonzero(columns.published)
        columns.used[rows] = np.argsort(np.argsort(columns.generation[rows])) + 1
        self.tick = len(rows) + 1

    def published(self, key: bytes, row: int, origin: BlockOrigin) -> None:
        """A block is there."""
        cells = self._columns.cells
        cells.used[row] = self.tick
        cells.kind[row], cells.depth[row] = origin.kind, min(origin.depth, MAX_DEPTH)
        before = -1 if origin.parent is None else self._index.find(origin.parent)
        if before >= 0:
            self._links.link_one(before, row)
        if self.policy is not None:
            self.policy.published(key)

    def gone(self, key: bytes, row: int, *, evicted: bool) -> int:
        """A block is not there any more; returns the row before it in its chain, -1 when there is none."""
        if self.policy is not None:
            self.policy.gone(key, evicted=evicted)
        if self._columns.cells.children[row]:
            for after in self._links.after(np.array([row])).tolist():
                self.on_cut(self._columns.key_of(after), key)
        return self._links.cut(row)

    def all_gone(self, rows: Rows) -> None:
        """All of these are about to go."""
        columns = self._columns
        for after in np.setdiff1d(self._links.after(rows), rows, assume_unique=True).tolist():
            self.on_cut(columns.key_of(after), columns.key_of(columns.cells.parent[after] - 1))
        self._links.cut_all(rows)

    def want(self, chain: Sequence[bytes], *, tenant: bytes, now_ms: float) -> npt.NDArray[np.bool_]:
        """A request wanted the chain's blocks: they become the most recent, its start the most of all. Which
        of them are here."""
        if not chain or not self._n_slots:
            return np.zeros(len(chain), np.bool_)
        columns, n = self._columns, len(chain)
        keys = np.frombuffer(b"".join(chain), np.uint64).reshape(-1, 2)
        kinds = self._used_policy().want(chain, keys, now_ms=now_ms)
        rows = self._index.find_many(chain)
        here = rows >= 0
        found, places = rows[here], np.flatnonzero(here)
        fresh = columns.kind[found] == NO_KIND
        alone = fresh & (columns.parent[found] == 0) & (columns.children[found] == 0)
        columns.depth[found[alone]] = np.minimum(places[alone], MAX_DEPTH)
        usual = np.where(fresh, FIRST_WANT, columns.kind[found])
        columns.kind[found] = usual if kinds is None else kinds[here]
        columns.used[found] = self.tick + n - places
        self.tick += n
        self._links.link(rows)
        if self._quota is not None:
            found = np.unique(found)
            number = self._quota.number_of(tenant)
            n_bytes = self._slot_bytes()[columns.slab[found]]
            columns.tenant[found] = self._quota.want(number, columns.tenant[found], n_bytes)
        return here

    def evict(self, slot_bytes: int, drop: Callable[[int], int]) -> bool:
        """`drop` the block of that size that goes next; False when none may."""
        evictor = self._evictors.get(slot_bytes)
        if evictor is None:
            evictor = self._evictors[slot_bytes] = Evictor(
                self._columns,
                self._holds,
                belongs=lambda rows: self._slot_bytes()[self._columns.slab[rows]] == slot_bytes,
                rng=self._rng,
            )
        return self._evict(evictor, drop)

    def make_tenant_room(self, number: int, slot_bytes: int, drop: Callable[[int], int]) -> bool:
        """`drop` blocks of the tenant until it may take the slot; False when they do not suffice."""
        if self._quota is None:
            return True

        def evict_one() -> bool:
            evictor = self._tenant_evictors.get(number)
            if evictor is None:
                evictor = self._tenant_evictors[number] = Evictor(
                    self._columns,
                    self._holds,
                    belongs=lambda rows: self._columns.tenant[rows] == number,
                    rng=self._rng,
                    all_rows=True,
                )
            return self._evict(evictor, drop)

        return self._quota.make_room(number, slot_bytes, evict_one)

    def check(self) -> None:
        """AssertionError unless the links of chains and the sums of tenants are right."""
        columns = self._columns
        linked = np.flatnonzero(columns.parent)
        before = columns.parent[linked].astype(np.int64) - 1
        assert columns.published[linked].all() and columns.published[before].all()
        assert (columns.depth[before] < columns.depth[linked]).all()
        assert (np.bincount(before, minlength=len(columns.children)) == columns.children).all()
        if self._quota is not None:
            self._quota.check(columns.tenant, self._slot_bytes()[columns.slab])

    def _evict(self, evictor: Evictor, drop: Callable[[int], int]) -> bool:
        policy = self._used_policy()
        row = evictor.next(policy, self.tick)
        if row < 0:
            return False
        evictor.freed(drop(row), policy, self.tick)
        return True

    def _used_policy(self) -> DiskPolicy:
        """The policy, made when it is first asked, with the blocks that are there already."""
        if self.policy is None:
            columns, most = self._columns, len(self._slabs) * self._n_slots
            policy = DiskPolicy(most, sampled_blocks=SAMPLED_BLOCKS)
            policy.resize(self._capacity())
            rows = np.flatnonzero(columns.published)
            rows = rows[policy.sampled(columns.key[rows])]
            for row in rows[np.argsort(columns.used[rows])].tolist():
                policy.published(columns.key_of(row))
            self.policy = policy
        return self.policy

    def _capacity(self) -> int:
        return sum(slab.n_slots for slab in self._slabs) + self._n_uncut * self._n_slots

    def _slot_bytes(self) -> npt.NDArray[np.int64]:
        """The slot size of each slab."""
        return np.array([slab.slot_bytes for slab in self._slabs], np.int64)

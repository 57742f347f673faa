"""What a disk's blocks are worth, for millions of them: the memory tier's policy in miniature. Pure.

One block in `rate`, chosen by its hash, is followed by the whole policy of `policy/eviction.py`, at a
capacity that is as much smaller: it learns what comes back, and duels with LRU. A chain of which only some
blocks are looked at is a thinner chain with the same prefixes, so the small cache does as the large one would
(miniature simulation: Waldspurger, Saemundsson, Ahmad and Park, USENIX ATC 2017). Every block of the disk has
the kind of its sampled neighbour in two bytes; its value follows from that and from its age.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.kvstore.disk.table.index import WORDS
from services.kvstore.policy.eviction import COST_SLOPE, EvictionPolicy
from services.kvstore.policy.experts import Dropped
from services.kvstore.policy.quota import NOBODY
from services.kvstore.policy.reuse import NEW_SESSION, bins_of, kind_of
from services.kvstore.policy.runs import Run

# Of a remembered block in the small policy: its key, its place in the tree and in a table.
_REMEMBERED_BYTES = 190
_FORGOTTEN_AT_ONCE = 1024
NO_KIND = 0xFFFF
DEFAULT_KIND = kind_of(1, 0, NEW_SESSION, 1, False)
_SPREAD = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a block comes from, as far as the memory tier knows: the block before it in its chain, how many
    are before it, its kind, and the tenant it counts for."""

    parent: bytes | None = None
    depth: int = 0
    kind: int = NO_KIND
    tenant: bytes = NOBODY


UNKNOWN = Origin()


class Miniature(EvictionPolicy):
    """The policy of the sample. It is asked what blocks are worth and who leads, never for a victim, so it
    keeps no list of who goes."""

    def __init__(
        self, capacity_blocks: int, *, is_present: Callable[[bytes], bool], scale: int, remembered_blocks: int
    ) -> None:
        super().__init__(
            capacity_blocks, is_present=is_present, scale=scale, min_remembered_blocks=remembered_blocks
        )
        self._stranger_kind = kind_of(1, 0, NEW_SESSION, scale, False)
        self._forget_at = self._most_remembered = 2 * capacity_blocks + remembered_blocks + _FORGOTTEN_AT_ONCE

    def publish(self, key: bytes) -> None:
        super().publish(key)
        if len(self.tree) > self._forget_at:  # also where many blocks come and nobody asks for any
            self._forget_old()
            self._forget_at = max(self._most_remembered, len(self.tree) + _FORGOTTEN_AT_ONCE)

    def condemn(self, key: bytes) -> None:
        return

    def lead(self, *, by_reuse: bool) -> None:
        self.leader = self._reuse if by_reuse else self._lru

    def _condemn_all(self, dropped: Sequence[Dropped]) -> None:
        return

    def _known(self, key: bytes) -> Run:
        run = self.tree.get(key)
        if run is None:
            run = self.tree.begin(key)
            run.session, run.frequency, run.last = NEW_SESSION, 1, self.tree.now
            self.tree.columns.last[run.index] = run.last
            self.tree.columns.kind[run.index] = self._stranger_kind
        return run


class DiskPolicy:
    """The policy of one disk. `is_present` tells whether the disk has a block."""

    def __init__(
        self,
        capacity_blocks: int,
        *,
        is_present: Callable[[bytes], bool],
        sampled_blocks: int,
    ) -> None:
        """`sampled_blocks`: how many the miniature holds at that capacity, and all if there are not more."""
        self.rate = max(1, -(-capacity_blocks // sampled_blocks))
        self._small = Miniature(
            max(1, capacity_blocks // self.rate),
            is_present=is_present,
            scale=self.rate,
            remembered_blocks=2 * sampled_blocks,
        )

    @property
    def by_reuse(self) -> bool:
        """Whether learned reuse leads, not LRU."""
        return self._small.by_reuse

    @property
    def changes(self) -> int:
        """How often the leader changed."""
        return self._small.duel.changes

    @property
    def rewanted(self) -> tuple[int, float]:
        """Blocks that were evicted and then wanted, and the sum of the times between, in ms: estimates
        from the sample."""
        return self._small.rewanted_blocks * self.rate, self._small.rewanted_gap_ms * self.rate

    @property
    def memory_bytes(self) -> int:
        """About what the policy takes, in bytes."""
        return len(self._small.tree) * _REMEMBERED_BYTES + self._small.model.memory_bytes

    def resize(self, capacity_blocks: int) -> None:
        """The disk has room for so many blocks from now on."""
        capacity = max(1, capacity_blocks // self.rate)
        if capacity != self._small.capacity_blocks:
            self._small.resize(capacity)

    def want(
        self, chain: Sequence[bytes], keys: npt.NDArray[np.uint64], *, now_ms: float
    ) -> npt.NDArray[np.uint16] | None:
        """A request wanted the chain, whose keys are also given as [n, 2]; the kinds of its blocks. None
        when no block of it is in the sample."""
        places = np.flatnonzero(self.sampled(keys))
        if not places.size:
            return None
        thin = [chain[place] for place in places.tolist()]
        self._small.want(thin, now_ms=now_ms)
        kinds = np.array([self._small.kind(key) for key in thin], np.uint16)
        nearest = np.searchsorted(places, np.arange(len(chain)))
        return kinds[np.minimum(nearest, len(places) - 1)]

    def published(self, key: bytes) -> None:
        """The block is on the disk now."""
        if self._is_sampled(key):
            self._small.publish(key)

    def gone(self, key: bytes, *, evicted: bool) -> None:
        """The block is not on the disk any more."""
        if self._is_sampled(key):
            (self._small.evicted if evicted else self._small.discard)(key)

    def values(
        self, kinds: npt.NDArray[np.uint16], ages: npt.NDArray[np.int64], depths: npt.NDArray[np.uint16]
    ) -> npt.NDArray[np.float64]:
        """What keeping each block is worth. `ages`: wanted blocks since each was wanted."""
        if not self.by_reuse:
            return -ages.astype(np.float64)
        known = np.where(kinds == NO_KIND, DEFAULT_KIND, kinds)
        worth = self._small.model.values[known, bins_of(ages // self.rate)]
        found: npt.NDArray[np.float64] = worth * (1.0 + COST_SLOPE * depths)
        return found

    def value(self, kind: int, age: int, depth: int) -> float:
        """As `values`, of one."""
        if not self.by_reuse:
            return -float(age)
        known = DEFAULT_KIND if kind == NO_KIND else kind
        return self._small.model.value_of(known, age // self.rate) * (1.0 + COST_SLOPE * depth)

    def lead(self, *, by_reuse: bool) -> None:
        """Follow the other one from now on."""
        self._small.lead(by_reuse=by_reuse)

    def _is_sampled(self, key: bytes) -> bool:
        if self.rate == 1:
            return True
        low, high = WORDS.unpack(key)
        mixed: int = (((low ^ (high >> 1)) * _SPREAD) & _MASK64) >> 33
        return mixed % self.rate == 0

    def sampled(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which of the blocks, [n, 2], the miniature follows."""
        # Other bits than those of the index's hash table.
        mixed = (keys[:, 0] ^ (keys[:, 1] >> np.uint64(1))) * np.uint64(_SPREAD) >> np.uint64(33)
        found: npt.NDArray[np.bool_] = mixed % np.uint64(self.rate) == 0
        return found

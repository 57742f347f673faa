"""What a disk's blocks are worth, for millions of them: the policy of memory in miniature. Pure.

One block in `rate`, chosen by its hash, goes through the adaptive policy (`policy/adaptive.py`) at a capacity
that is as much smaller. A chain of which only some blocks are seen is a thinner chain with the same prefixes.
So the small cache does as the large one would (miniature simulation: Waldspurger, Saemundsson, Ahmad and
Park, USENIX ATC 2017). Every block of the disk has the kind of its sampled neighbour in two bytes; its value
follows from that and from its age.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.kvstore.disk.table.index import WORDS
from services.kvstore.policy.adaptive import AdaptivePolicy
from services.kvstore.policy.history import FIRST_WANT
from services.kvstore.policy.quota import NO_TENANT

# Of a remembered block in the small policy: its record, its key, and its places in the simulated caches.
_REMEMBERED_BYTES = 900
NO_KIND = 0xFFFF
_SPREAD = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class BlockOrigin:
    """Where a block comes from, as far as the memory tier knows.

    `parent` is the block before it in its chain, `depth` how many are before it, and `tenant` the one it
    counts for.
    """

    parent: bytes | None = None
    depth: int = 0
    kind: int = NO_KIND
    tenant: bytes = NO_TENANT


UNKNOWN = BlockOrigin()


class DiskPolicy:
    """The policy of one disk."""

    def __init__(self, capacity_blocks: int, *, sampled_blocks: int) -> None:
        """`sampled_blocks`: how many the miniature holds at that capacity, and all if there are not more."""
        self.rate = max(1, -(-capacity_blocks // sampled_blocks))
        small = max(1, capacity_blocks // self.rate)
        self.sampled_policy = AdaptivePolicy(small)

    @property
    def changes(self) -> int:
        """How often another policy was followed."""
        return self.sampled_policy.changes

    @property
    def rewanted(self) -> tuple[int, float]:
        """Blocks that were evicted and then wanted, and the sum of the times between, in ms: estimates
        from the sample."""
        sample = self.sampled_policy
        return sample.rewanted_blocks * self.rate, sample.rewanted_gap_ms * self.rate

    @property
    def memory_bytes(self) -> int:
        """About what the policy takes, in bytes."""
        return len(self.sampled_policy.history) * _REMEMBERED_BYTES

    def resize(self, capacity_blocks: int) -> None:
        """Set the number of blocks that the disk has room for."""
        capacity = max(1, capacity_blocks // self.rate)
        if capacity != self.sampled_policy.capacity_blocks:
            self.sampled_policy.resize(capacity)

    def want(
        self, chain: Sequence[bytes], keys: npt.NDArray[np.uint64], *, now_ms: float
    ) -> npt.NDArray[np.uint16] | None:
        """A request wanted the chain, whose keys are also given as [n, 2]; the kinds of its blocks. None
        when no block of it is in the sample."""
        places = np.flatnonzero(self.sampled(keys))
        if not places.size:
            return None
        thin = [chain[at] for at in places.tolist()]
        self.sampled_policy.want(thin, now_ms=now_ms)
        kinds = np.array([self.sampled_policy.kind(key) for key in thin], np.uint16)
        nearest = np.searchsorted(places, np.arange(len(chain)))
        return kinds[np.minimum(nearest, len(places) - 1)]

    def published(self, key: bytes) -> None:
        """The block is on the disk now."""
        if self._is_sampled(key):
            self.sampled_policy.publish(key)

    def gone(self, key: bytes, *, evicted: bool) -> None:
        """The block is not on the disk any more."""
        if self._is_sampled(key):
            (self.sampled_policy.evicted if evicted else self.sampled_policy.discard)(key)

    def values(self, kinds: npt.NDArray[np.uint16], ages: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """What keeping each block is worth. `ages`: wanted blocks since each was wanted."""
        known = np.where(kinds == NO_KIND, FIRST_WANT, kinds).astype(np.int64)
        return self.sampled_policy.values(known, ages // self.rate)

    def value(self, kind: int, age: int) -> float:
        """The value of one block."""
        return float(self.values(np.array([kind], np.uint16), np.array([age], np.int64))[0])

    def _is_sampled(self, key: bytes) -> bool:
        if self.rate == 1:
            return True
        return bool(_spread(*WORDS.unpack(key)) % self.rate == 0)

    def sampled(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which of the blocks, [n, 2], the miniature follows."""
        found: npt.NDArray[np.bool_] = _spread(keys[:, 0], keys[:, 1]) % self.rate == 0
        return found


def _spread(low: Any, high: Any) -> Any:
    """A hash of a key's words, which are numbers or arrays of 64 bits.

    It has other bits than the index's hash table. It also differs from the hash of `History`, which samples
    again what this one chose.
    """
    return (((low ^ (high >> 1)) * _SPREAD) & _MASK64) >> 33

"""Where the KV of a prompt's prefix is: what workers say they hold, and what was just sent to them. Pure.

A block's hash names its whole prefix (docs/block-hash.md), so no tree is needed: for each holder there is
the flat set of hashes it holds, and the longest prefix held is found by bisection over the prompt's
hashes. There is nothing to split or merge, and a holder that is gone is dropped in one step. A holder
that keeps a block without those before it (a store may) can make the answer wrong; like every wrong entry
that costs time and nothing else.

Entries predicted at routing time stand in until the worker's events confirm them or their time is over,
so that siblings that come in one burst find each other. They are counted by tenant.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from libs.common.kv_event_view import BlockView

MAX_BLOCKS = 2_000_000
MAX_PREDICTED_BLOCKS = 200_000
MAX_TENANT_PREDICTED_BLOCKS = 50_000
_NOTHING: Set[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class _Batch:
    holder: str
    hashes: tuple[bytes, ...]
    until_s: float


class PrefixIndex:
    """Holders are any names; sizes are in blocks."""

    def __init__(
        self,
        *,
        max_blocks: int = MAX_BLOCKS,
        max_predicted: int = MAX_PREDICTED_BLOCKS,
        max_tenant_predicted: int = MAX_TENANT_PREDICTED_BLOCKS,
    ) -> None:
        self._max_blocks = max_blocks
        self._max_predicted = max_predicted
        self._max_tenant_predicted = max_tenant_predicted
        self._views: dict[str, BlockView] = {}
        self._predicted: dict[str, dict[bytes, float]] = {}  # holder -> hash -> until when
        self._batches: dict[str, deque[_Batch]] = {}  # by tenant, oldest first
        self._tenant_blocks: dict[str, int] = {}

    @property
    def blocks(self) -> int:
        """Confirmed entries."""
        return sum(len(hashes) for view in self._views.values() for hashes in view.held.values())

    @property
    def predicted_blocks(self) -> int:
        """Entries of `predict` that are still remembered."""
        return sum(self._tenant_blocks.values())

    def tenant_blocks(self, tenant: str) -> int:
        """Those of one tenant."""
        return self._tenant_blocks.get(tenant, 0)

    # ---- what holders say

    def view(self, holder: str) -> BlockView:
        """The holder's view, to apply its events to; call `trim` afterwards."""
        return self._views.setdefault(holder, BlockView())

    def knows(self, holder: str) -> bool:
        """Whether the holder has told what it holds."""
        view = self._views.get(holder)
        return view is not None and bool(view.incarnation)

    def drop(self, holder: str) -> None:
        """The holder is gone. Idempotent."""
        self._views.pop(holder, None)
        self._predicted.pop(holder, None)

    def trim(self) -> int:
        """Forget entries beyond the bound, of the largest sets first; returns how many."""
        surplus = total = self.blocks - self._max_blocks
        while surplus > 0:
            sets = [hashes for view in self._views.values() for hashes in view.held.values()]
            largest = max(sets, key=len)
            for _ in range(min(surplus, max(1, len(largest) // 8))):
                largest.pop()
                surplus -= 1
        return max(total, 0)

    # ---- what was sent

    def predict(
        self, holder: str, hashes: Sequence[bytes], *, tenant: str, now_s: float, ttl_s: float
    ) -> None:
        """The holder will soon hold these, in prompt order. What it holds already is passed over."""
        self._expire(tenant, now_s)
        first = self.prefix_blocks(holder, hashes, now_s=now_s)
        fresh = tuple(hashes[first : first + self._max_tenant_predicted])
        if not fresh:
            return
        entries = self._predicted.setdefault(holder, {})
        for block_hash in fresh:
            entries[block_hash] = now_s + ttl_s
        self._batches.setdefault(tenant, deque()).append(_Batch(holder, fresh, now_s + ttl_s))
        self._tenant_blocks[tenant] = self._tenant_blocks.get(tenant, 0) + len(fresh)
        while self._tenant_blocks[tenant] > self._max_tenant_predicted:
            self._forget_oldest(tenant)
        while self.predicted_blocks > self._max_predicted:
            self._forget_oldest(max(self._tenant_blocks, key=self._tenant_blocks.__getitem__))

    def _expire(self, tenant: str, now_s: float) -> None:
        for name in (tenant, *[other for other in list(self._batches)[:1] if other != tenant]):
            batches = self._batches.get(name)
            while batches and batches[0].until_s <= now_s:
                self._forget_oldest(name)
                batches = self._batches.get(name)

    def _forget_oldest(self, tenant: str) -> None:
        batches = self._batches[tenant]
        batch = batches.popleft()
        entries = self._predicted.get(batch.holder, {})
        for block_hash in batch.hashes:
            if entries.get(block_hash) == batch.until_s:
                del entries[block_hash]
        if not entries:
            self._predicted.pop(batch.holder, None)
        self._tenant_blocks[tenant] -= len(batch.hashes)
        if not batches:
            del self._batches[tenant], self._tenant_blocks[tenant]

    # ---- lookups

    def prefix_blocks(
        self, holder: str, hashes: Sequence[bytes], *, now_s: float, tier: int | None = None
    ) -> int:
        """How many leading blocks the holder has or is about to have; with `tier`, has in that tier."""
        view = self._views.get(holder)
        tiers: Mapping[int, Set[bytes]] = view.held if view is not None else {}
        if tier is not None:
            held = tiers.get(tier, _NOTHING)
            return _longest(hashes, held.__contains__)
        sets = [hashes_of_tier for hashes_of_tier in tiers.values() if hashes_of_tier]
        predicted = self._predicted.get(holder)
        if predicted is None:
            if len(sets) == 1:
                return _longest(hashes, sets[0].__contains__)
            return _longest(hashes, lambda h: any(h in s for s in sets))
        return _longest(hashes, lambda h: predicted.get(h, 0.0) > now_s or any(h in s for s in sets))


def _longest(hashes: Sequence[bytes], is_held: Callable[[bytes], bool]) -> int:
    """The number of leading hashes held, if none is held after one that is not: about log2(n) probes."""
    if not hashes or not is_held(hashes[0]):
        return 0
    if is_held(hashes[-1]):
        return len(hashes)
    return bisect.bisect_left(hashes, True, 1, len(hashes) - 1, key=lambda h: not is_held(h))

"""Drops blocks on the disks that no look-up reaches, a few at a time.

Eviction leaves none: it takes the ends of chains. They are left where a disk loses the start of a chain, by a
block that does not verify, a segment whose sync failed, an operator; and where the start was never written.
The disks report each block that they have without the one before it. A block found when a disk is opened is
in no known chain before a request wants it.

A dropped block's slot is free, its header stays as it is after an eviction: until the slot is used again, a
start finds the block.
"""

from __future__ import annotations

from collections.abc import Callable

from services.kvstore.disk.set import DiskSet
from services.kvstore.dram.tier import DramTier
from services.kvstore.unreachable.watch import UnreachableWatch

LOOK_EVERY_S = 1.0


class DiskSweep:
    """Event loop only. `is_held`: whether a block is in any tier that this node reads; `knows_all`: whether
    that can be told of all of them but the disks now."""

    def __init__(
        self,
        disks: DiskSet,
        dram: DramTier,
        *,
        is_held: Callable[[bytes], bool],
        knows_all: Callable[[], bool] = lambda: True,
    ) -> None:
        self._disks = disks
        self._knows_all = knows_all
        self._look_at_s = 0.0
        self._watch = UnreachableWatch(
            is_present=disks.contains,
            is_usable=is_held,
            is_spared=lambda key: dram.get(key) is not None,
            reports_losses=True,
        )
        disks.on_gap = self._watch.put

    @property
    def blocks(self) -> int:
        """Unreachable blocks that are known now."""
        return self._watch.blocks

    @property
    def dropped_blocks(self) -> int:
        """Unreachable blocks that were dropped so far."""
        return self._watch.dropped_blocks

    def look(self, *, now_s: float) -> int:
        """Drop some of those that stayed unreachable, but for those in memory, which has a sweep.
        At most once in LOOK_EVERY_S; how many were dropped."""
        if now_s < self._look_at_s:
            return 0
        self._look_at_s = now_s + LOOK_EVERY_S
        self._disks.watch_gaps()
        if any(tier.unavailable for tier in self._disks.tiers) or not self._knows_all():
            self._watch.clear()  # what is before a block may be there
            return 0
        due = self._watch.look(now_s=now_s)
        if due:
            self._watch.dropped(due, now_s=now_s)  # before their successors are told of
            for tier in self._disks.tiers:
                tier.table.drop_all([block for key in due if (block := tier.table.get(key)) is not None])
        return len(due)

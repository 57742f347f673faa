"""Drops blocks on the disks that no look-up reaches, a few at a time.

Eviction leaves none: it takes the ends of chains. They are left where a disk loses the start of a chain, by a
block that does not verify, a segment whose sync failed, an operator; and where the start was never written.
The disks report each block that they have without the one before it. A block found when a disk is opened is
in no known chain before a request wants it.

A dropped block's slot is free, its header stays as it is after an eviction: until the slot is used again, a
start finds the block.
"""

from __future__ import annotations

from typing import Protocol

from services.kvstore.disk.set import DiskSet
from services.kvstore.dram.tier import DramTier
from services.kvstore.unreachable.watch import UnreachableWatch

LOOK_EVERY_S = 1.0


class AllTiers(Protocol):
    """All tiers that this node reads."""

    def is_readable(self, key: bytes) -> bool:
        """Whether the block is in one of them."""
        ...

    def knows_all(self) -> bool:
        """Whether that is certain now for all of them but the disks."""
        ...


class DiskSweep:
    """The sweep of a node's disks. Event loop only."""

    def __init__(self, disks: DiskSet, dram: DramTier, tiers: AllTiers) -> None:
        self._disks = disks
        self._dram = dram
        self._tiers = tiers
        self._look_at_s = 0.0
        self._watch = UnreachableWatch(self, reports_losses=True)
        disks.on_gap = self._watch.put

    @property
    def blocks(self) -> int:
        """Unreachable blocks that are known now."""
        return self._watch.blocks

    @property
    def dropped_blocks(self) -> int:
        """Unreachable blocks that were dropped so far."""
        return self._watch.dropped_blocks

    def is_present(self, key: bytes) -> bool:
        """Whether the block is on a disk."""
        return self._disks.contains(key)

    def is_usable(self, key: bytes) -> bool:
        """Whether the block is in any tier that this node reads."""
        return self._tiers.is_readable(key)

    def is_spared(self, key: bytes) -> bool:
        """Whether the block is in memory, which has a sweep."""
        return self._dram.get(key) is not None

    def sweep(self, *, now_s: float) -> int:
        """Drop some of those that stayed unreachable, but for those in memory, which has a sweep.
        At most once in LOOK_EVERY_S; how many were dropped."""
        if now_s < self._look_at_s:
            return 0
        self._look_at_s = now_s + LOOK_EVERY_S
        self._disks.watch_gaps()
        if any(tier.unavailable for tier in self._disks.tiers) or not self._tiers.knows_all():
            self._watch.clear()  # what is before a block may be there
            return 0
        due = self._watch.poll(now_s=now_s)
        if due:
            self._watch.dropped(due, now_s=now_s)  # before their successors are reported
            for tier in self._disks.tiers:
                tier.table.drop_all([block for key in due if (block := tier.table.get(key)) is not None])
        return len(due)

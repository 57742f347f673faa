"""Drops blocks in memory that nobody can use, a few runs of chains at a time."""

from __future__ import annotations

from collections.abc import Callable

from services.kvstore.dram.tier import DramTier
from services.kvstore.policy.orphans import OrphanSweep

# Of each block size at each look; a run is a stretch of a chain.
RUNS_AT_ONCE = 256


class DramOrphans:
    """`is_held`: whether a block is in any tier that this node reads."""

    def __init__(self, dram: DramTier, *, is_held: Callable[[bytes], bool]) -> None:
        self._table = dram.table
        self._is_held = is_held
        self._sweeps: dict[int, OrphanSweep] = {}
        self.dropped_blocks = 0

    @property
    def blocks(self) -> int:
        """Orphans that the last whole rounds found."""
        return sum(sweep.blocks for sweep in self._sweeps.values())

    def look(self) -> int:
        """Look at some more runs and drop the orphans among them, but for those that somebody holds; how many
        were dropped."""
        dropped = 0
        for slot_bytes, policy in self._table.policies.items():
            sweep = self._sweeps.get(slot_bytes)
            if sweep is None:
                sweep = OrphanSweep(policy, is_present=self._is_present, is_held=self._is_held)
                self._sweeps[slot_bytes] = sweep
            for key in sweep.look(RUNS_AT_ONCE):
                block = self._table.get(key)
                if block is not None and not block.holds:
                    self._table.drop(block)
                    dropped += 1
        self.dropped_blocks += dropped
        return dropped

    def _is_present(self, key: bytes) -> bool:
        return self._table.get(key) is not None

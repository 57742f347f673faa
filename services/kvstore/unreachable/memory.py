"""Drops blocks in memory that no look-up reaches, a few at a time.

They are left where a block is dropped for another reason than its place in the eviction order. Reasons are a
change of the policy, an operator's drop, and a slab that is cut again. A block that the live policy holds
stays: its chain's start comes back with the next turn.
"""

from __future__ import annotations

from collections.abc import Callable

from services.kvstore.dram.slots import SlotTable
from services.kvstore.dram.tier import DramTier
from services.kvstore.policy.adaptive import AdaptivePolicy
from services.kvstore.policy.history import BlockRecord

# Of each block size at each look.
LOOK_BLOCKS = 2048


class MemorySweep:
    """`is_held`: whether a block is in any tier that this node reads."""

    def __init__(self, dram: DramTier, *, is_held: Callable[[bytes], bool]) -> None:
        self._table: SlotTable[bytes] = dram.table
        self._is_held = is_held
        self._rounds: dict[int, _Round] = {}
        self.dropped_blocks = 0

    @property
    def blocks(self) -> int:
        """Unreachable blocks that the last whole rounds found."""
        return sum(each.blocks for each in self._rounds.values())

    def sweep(self) -> int:
        """Drop the unreachable ones among some more blocks, but for held ones; how many were dropped."""
        dropped = 0
        for slot_bytes, policy in self._table.policies.items():
            found = self._rounds.setdefault(slot_bytes, _Round()).sweep(policy, self._is_held)
            for record in found:
                block = self._table.get(record.key)
                if block is not None and not block.holds:
                    self._table.drop(block)
                    dropped += 1
        self.dropped_blocks += dropped
        return dropped


class _Round:
    """Goes over the remembered blocks of one policy again and again, the most recent first: the start of a
    chain before its end."""

    def __init__(self) -> None:
        self.blocks = 0  # found by the last whole round
        self._found = 0
        self._left: list[BlockRecord] = []

    def sweep(self, policy: AdaptivePolicy, is_held: Callable[[bytes], bool]) -> list[BlockRecord]:
        """Unreachable blocks among the next ones, those at the end of their chains first."""
        if not self._left:
            self.blocks, self._found = self._found, 0
            self._left = list(policy.history.records())
        found: dict[BlockRecord, None] = {}
        for _ in range(min(LOOK_BLOCKS, len(self._left))):
            record = self._left.pop()
            parent = record.parent
            if parent is None or not record.present or record in policy.live:
                continue
            if parent in found or not is_held(parent.key):
                found[record] = None
        self._found += len(found)
        return list(reversed(found))

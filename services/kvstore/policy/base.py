"""The interface of eviction policies. Pure.

A policy is a cache of records without bytes. It serves chains, holds at most `capacity_blocks` and lists the
records that left. A record has a bit for each policy that holds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from services.kvstore.policy.history import BlockRecord


class EvictionPolicy(ABC):
    """Holds records and chooses which of them leaves next."""

    name: ClassVar[str]

    def __init__(self, capacity_blocks: int, *, bit: int = 1) -> None:
        """`bit`: its own in `BlockRecord.held`."""
        self.capacity_blocks = capacity_blocks
        self.bit = bit
        self.evicted: list[BlockRecord] = []  # since the caller cleared it; a record may be back

    @abstractmethod
    def serve(self, path: Sequence[BlockRecord]) -> int:
        """Count the leading blocks held, then take in the missing blocks of a wanted chain.

        The chain is processed from its end, so that its start is the most recent and leaves last."""

    @abstractmethod
    def evict(self) -> None:
        """Evict the record that leaves next. At least one is held."""

    @abstractmethod
    def __len__(self) -> int: ...

    def __contains__(self, record: object) -> bool:
        return isinstance(record, BlockRecord) and bool(record.held & self.bit)

    def resize(self, capacity_blocks: int) -> None:
        """Change the capacity, and evict what is beyond it."""
        self.capacity_blocks = capacity_blocks
        while len(self) > capacity_blocks:
            self.evict()

    def check(self) -> None:
        """Raise AssertionError unless the policy's own counts are right."""
        assert len(self) <= self.capacity_blocks

    def _leave(self, record: BlockRecord) -> None:
        record.held &= ~self.bit
        self.evicted.append(record)

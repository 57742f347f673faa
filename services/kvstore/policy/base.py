"""The interface of eviction policies. Pure.

A policy is a cache of records without bytes. It serves chains, holds at most `capacity_blocks` and lists the
records that left. The same class is a simulated cache and the live policy of a tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from services.kvstore.policy.history import BlockRecord

Queue = OrderedDict[BlockRecord, None]  # the next to leave first


class EvictionPolicy(ABC):
    """Holds records and chooses which of them leaves next."""

    name: ClassVar[str]

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.evicted: list[BlockRecord] = []  # since the caller cleared it; a record may be back

    @abstractmethod
    def serve(self, path: Sequence[BlockRecord]) -> int:
        """Count the leading blocks held, then take in the missing blocks of a wanted chain.

        The chain is processed from its end, so that its start is the most recent and leaves last."""

    @abstractmethod
    def evict(self) -> None:
        """Evict the record that leaves next, if any is held."""

    @abstractmethod
    def __contains__(self, record: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    def resize(self, capacity_blocks: int) -> None:
        """Change the capacity, and evict what is beyond it."""
        self.capacity_blocks = capacity_blocks
        while len(self) > capacity_blocks:
            self.evict()

    def release(self) -> None:  # noqa: B027
        """The policy is used no more: it holds no record."""

    def check(self) -> None:
        """Raise AssertionError unless the policy's own counts are right."""
        assert len(self) <= self.capacity_blocks

"""ARC, the adaptive replacement cache: Megiddo and Modha, FAST 2003. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from services.kvstore.policy.base import EvictionPolicy
from services.kvstore.policy.history import BlockRecord, Queue


class ArcPolicy(EvictionPolicy):
    """Queues blocks wanted once and blocks wanted again apart; a hit among the recently evicted of one
    queue gives that queue more room."""

    name: ClassVar[str] = "arc"

    def __init__(self, capacity_blocks: int, *, bit: int = 1) -> None:
        super().__init__(capacity_blocks, bit=bit)
        self._recent: Queue = Queue()
        self._frequent: Queue = Queue()
        self._recent_ghosts: Queue = Queue()
        self._frequent_ghosts: Queue = Queue()
        self._target_blocks = 0.0  # of `_recent`

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def serve(self, path: Sequence[BlockRecord]) -> int:
        recent, frequent, bit, hits = self._recent, self._frequent, self.bit, 0
        for record in path:
            if not record.held & bit:
                break
            hits += 1
        if self.capacity_blocks > 0:
            for record in reversed(path):
                if record in frequent:
                    frequent.move_to_end(record)
                elif record in recent:
                    del recent[record]
                    frequent[record] = None
                else:
                    self._miss(record)
        return hits

    def evict(self) -> None:
        self._evict(in_frequent_ghosts=False)

    def resize(self, capacity_blocks: int) -> None:
        super().resize(capacity_blocks)
        self._target_blocks = min(self._target_blocks, float(capacity_blocks))
        self._trim_ghosts()

    def _miss(self, record: BlockRecord) -> None:
        record.held |= self.bit
        recent_ghosts, frequent_ghosts = self._recent_ghosts, self._frequent_ghosts
        is_full = len(self._recent) + len(self._frequent) >= self.capacity_blocks
        if record in recent_ghosts:
            step = max(1.0, len(frequent_ghosts) / len(recent_ghosts))
            self._target_blocks = min(float(self.capacity_blocks), self._target_blocks + step)
            if is_full:
                self._evict(in_frequent_ghosts=False)
            del recent_ghosts[record]
            self._frequent[record] = None
        elif record in frequent_ghosts:
            step = max(1.0, len(recent_ghosts) / len(frequent_ghosts))
            self._target_blocks = max(0.0, self._target_blocks - step)
            if is_full:
                self._evict(in_frequent_ghosts=True)
            del frequent_ghosts[record]
            self._frequent[record] = None
        else:
            if is_full:
                self._evict(in_frequent_ghosts=False)
            self._recent[record] = None
            self._trim_ghosts()

    def _evict(self, *, in_frequent_ghosts: bool) -> None:
        """The paper's REPLACE, and its case IV.A where `_recent` has the whole capacity."""
        recent, frequent, target = self._recent, self._frequent, self._target_blocks
        is_long = len(recent) > target or (in_frequent_ghosts and len(recent) == int(target))
        if recent and (is_long or not frequent):
            record = recent.popitem(last=False)[0]
            self._recent_ghosts[record] = None
        else:
            record = frequent.popitem(last=False)[0]
            self._frequent_ghosts[record] = None
        self._leave(record)

    def _trim_ghosts(self) -> None:
        """Keep at most one capacity of recent blocks and ghosts, and two of all."""
        capacity = self.capacity_blocks
        recent_ghosts, frequent_ghosts = self._recent_ghosts, self._frequent_ghosts
        while recent_ghosts and len(self._recent) + len(recent_ghosts) > capacity:
            recent_ghosts.popitem(last=False)
        while frequent_ghosts and len(self) + len(recent_ghosts) + len(frequent_ghosts) > 2 * capacity:
            frequent_ghosts.popitem(last=False)

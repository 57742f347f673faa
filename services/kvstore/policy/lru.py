"""Least recently used. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from services.kvstore.policy.base import EvictionPolicy
from services.kvstore.policy.history import BlockRecord, Queue


class LruPolicy(EvictionPolicy):
    """Evicts the block whose last want is longest ago; within a chain the end."""

    name: ClassVar[str] = "lru"

    def __init__(self, capacity_blocks: int, *, bit: int = 1) -> None:
        super().__init__(capacity_blocks, bit=bit)
        self._queue: Queue = Queue()

    def __len__(self) -> int:
        return len(self._queue)

    def serve(self, path: Sequence[BlockRecord]) -> int:
        queue, bit, hits = self._queue, self.bit, 0
        for record in path:
            if not record.held & bit:
                break
            hits += 1
        move_to_end = queue.move_to_end
        for record in reversed(path):
            queue[record] = None
            record.held |= bit
            move_to_end(record)
        for _ in range(len(queue) - self.capacity_blocks):
            self.evict()
        return hits

    def evict(self) -> None:
        self._leave(self._queue.popitem(last=False)[0])

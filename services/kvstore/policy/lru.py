"""Least recently used. Pure."""

from __future__ import annotations

from typing import ClassVar

from services.kvstore.policy.base import EvictionPolicy, Floats, Ints, Queue
from services.kvstore.policy.history import BlockRecord, History


class LruPolicy(EvictionPolicy):
    """The block that was not wanted for longest goes; within a chain its end."""

    name: ClassVar[str] = "lru"

    def __init__(self, capacity_blocks: int, history: History) -> None:
        super().__init__(capacity_blocks, history)
        self._queue: Queue = Queue()

    def values(self, kinds: Ints, ages: Ints) -> Floats:
        return -ages.astype(float)

    def adopt(self, record: BlockRecord) -> None:
        self._push(record, self._queue)

    def _hit(self, record: BlockRecord) -> None:
        self._queue.move_to_end(record)

    def _miss(self, record: BlockRecord) -> None:
        self._push(record, self._queue)

    def _pop_victim(self) -> BlockRecord:
        return self._drop(self._oldest_end(self._queue) or self._any_end([self._queue]))

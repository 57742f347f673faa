"""ARC, the adaptive replacement cache: Megiddo and Modha, FAST 2003. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from services.kvstore.policy.base import EvictionPolicy, Queue
from services.kvstore.policy.history import BlockRecord, History


class ArcPolicy(EvictionPolicy):
    """Blocks wanted once and blocks wanted again, each least recent first; hits among the evicted of one
    kind give it room."""

    name: ClassVar[str] = "arc"

    def __init__(self, capacity_blocks: int, history: History) -> None:
        super().__init__(capacity_blocks, history)
        self._recent: Queue = Queue()
        self._frequent: Queue = Queue()
        self._recent_ghosts: Queue = Queue()
        self._frequent_ghosts: Queue = Queue()
        self._target_blocks = 0.0  # for `_recent`

    def follow(self, simulated: EvictionPolicy, scale: int) -> None:
        assert isinstance(simulated, ArcPolicy)
        self._target_blocks = min(float(self.capacity_blocks), simulated._target_blocks * scale)

    def serve(self, path: Sequence[BlockRecord]) -> list[BlockRecord]:
        evicted = super().serve(path)
        self._trim_ghosts()
        return evicted

    def adopt(self, record: BlockRecord) -> None:
        self._push(record, self._recent if record.wants < 2 else self._frequent)

    def _hit(self, record: BlockRecord) -> None:
        self._push(record, self._frequent)

    def _miss(self, record: BlockRecord) -> None:
        recent, frequent = self._recent_ghosts, self._frequent_ghosts
        if record in recent:
            step = max(1.0, len(frequent) / len(recent))
            self._target_blocks = min(float(self.capacity_blocks), self._target_blocks + step)
            del recent[record]
            self._push(record, self._frequent)
        elif record in frequent:
            step = max(1.0, len(recent) / len(frequent))
            self._target_blocks = max(0.0, self._target_blocks - step)
            del frequent[record]
            self._push(record, self._frequent)
        else:
            self._push(record, self._recent)

    def _pop_victim(self) -> BlockRecord:
        queues = [self._recent, self._frequent]
        if len(self._recent) <= self._target_blocks:
            queues.reverse()
        found = self._oldest_end(queues[0]) or self._oldest_end(queues[1]) or self._any_end(queues)
        ghosts = self._recent_ghosts if self.held[found] is self._recent else self._frequent_ghosts
        ghosts[found] = None
        return self._drop(found)

    def _trim_ghosts(self) -> None:
        while self._recent_ghosts and len(self._recent) + len(self._recent_ghosts) > self.capacity_blocks:
            self._recent_ghosts.popitem(last=False)
        ghosts = len(self._recent_ghosts) + len(self._frequent_ghosts)
        for _ in range(min(ghosts - self.capacity_blocks, len(self._frequent_ghosts))):
            self._frequent_ghosts.popitem(last=False)

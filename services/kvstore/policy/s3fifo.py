"""S3-FIFO: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. Pure."""

from __future__ import annotations

from typing import ClassVar

from services.kvstore.policy.base import MAX_TRIES, EvictionPolicy, Queue
from services.kvstore.policy.history import BlockRecord, History

MAX_USES = 3
SMALL_PART = 10  # the small queue has one block in so many


class S3FifoPolicy(EvictionPolicy):
    """A small queue from which only blocks wanted again go on, a main queue with second chances, and the
    evicted of the small one, which come back into the main one."""

    name: ClassVar[str] = "s3fifo"

    def __init__(self, capacity_blocks: int, history: History) -> None:
        super().__init__(capacity_blocks, history)
        self._small: Queue = Queue()
        self._main: Queue = Queue()
        self._ghosts: Queue = Queue()
        self._uses: dict[BlockRecord, int] = {}  # since it came into its queue

    def adopt(self, record: BlockRecord) -> None:
        self._push(record, self._small if record.wants < 2 else self._main)
        self._uses[record] = 0

    def _hit(self, record: BlockRecord) -> None:
        uses = self._uses
        if uses[record] < MAX_USES:
            uses[record] += 1

    def _miss(self, record: BlockRecord) -> None:
        if record in self._ghosts:
            del self._ghosts[record]
            self._push(record, self._main)
        else:
            self._push(record, self._small)
        self._uses[record] = 0

    def _pop_victim(self) -> BlockRecord:
        passed = 0  # blocks that others come after
        while passed < MAX_TRIES:
            if not self._main or len(self._small) > self.capacity_blocks // SMALL_PART:
                record, turn = next(iter(self._small)), self._turn_small
            else:
                record, turn = next(iter(self._main)), self._turn_main
            passed += record in self._children
            if turn(record):
                return record
        return self._forget(self._any_end([self._small, self._main]))

    def _turn_small(self, record: BlockRecord) -> bool:
        """The oldest of the small queue goes (True), or on into the main one."""
        if self._uses[record] > 1 or record in self._children:
            self._uses[record] = 0
            self._push(record, self._main)
            return False
        self._ghosts[record] = None
        if len(self._ghosts) > self.capacity_blocks:
            self._ghosts.popitem(last=False)
        self._forget(record)
        return True

    def _turn_main(self, record: BlockRecord) -> bool:
        """The oldest of the main queue goes (True), or is used up a little."""
        if self._uses[record] or record in self._children:
            self._uses[record] = max(0, self._uses[record] - 1)
            self._main.move_to_end(record)
            return False
        self._forget(record)
        return True

    def _forget(self, record: BlockRecord) -> BlockRecord:
        del self._uses[record]
        return self._drop(record)

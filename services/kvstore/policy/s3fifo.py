"""S3-FIFO: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from services.kvstore.policy.base import EvictionPolicy
from services.kvstore.policy.history import BlockRecord, Queue

MAX_USES = 3
SMALL_PART = 10  # the small queue has one block in so many


class S3FifoPolicy(EvictionPolicy):
    """A small queue, which only blocks wanted again leave for the main queue, and ghosts of the small one."""

    name: ClassVar[str] = "s3fifo"

    def __init__(self, capacity_blocks: int, *, bit: int = 1) -> None:
        super().__init__(capacity_blocks, bit=bit)
        self._small: OrderedDict[BlockRecord, int] = OrderedDict()  # and the uses since it came
        self._main: OrderedDict[BlockRecord, int] = OrderedDict()
        self._ghosts: Queue = Queue()

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def serve(self, path: Sequence[BlockRecord]) -> int:
        small, main = self._small, self._main
        bit, hits, found = self.bit, 0, 0
        for at, record in enumerate(path):
            queue = main if record in main else small if record in small else None
            if queue is None:
                continue
            uses = queue[record]
            if uses < MAX_USES:
                queue[record] = uses + 1
            hits += found == at
            found += 1
        if found < len(path) and self.capacity_blocks > 0:
            for record in reversed(path):
                if not record.held & bit:
                    self._miss(record)
        return hits

    def _miss(self, record: BlockRecord) -> None:
        record.held |= self.bit
        while len(self._small) + len(self._main) >= self.capacity_blocks:
            self.evict()
        if record in self._ghosts:
            del self._ghosts[record]
            self._main[record] = 0
        else:
            self._small[record] = 0

    def evict(self) -> None:
        small, main = self._small, self._main
        while True:
            if not main or len(small) >= max(1, self.capacity_blocks // SMALL_PART):
                record, uses = small.popitem(last=False)
                if uses > 1:
                    main[record] = 0
                    continue
                self._ghosts[record] = None
                if len(self._ghosts) > self.capacity_blocks:
                    self._ghosts.popitem(last=False)
            else:
                record, uses = main.popitem(last=False)
                if uses:
                    main[record] = uses - 1
                    continue
            self._leave(record)
            return

"""Least hit density first: LHD, Beckmann, Chen and Cidon, NSDI 2018. Pure.

The value of a block is the hits it is expected to give for the room and time it takes, learned for kinds of
blocks and ages (`policy/reuse.py`). There is a queue for each kind; the oldest blocks of the queues are
compared, and with them a block that would come. It is not taken in where it is worth less than all of them.
Only ends of chains leave: a block is of no use without those before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import ClassVar

from services.kvstore.policy.base import EvictionPolicy
from services.kvstore.policy.history import N_KINDS, BlockRecord, History, Queue
from services.kvstore.policy.reuse import ReuseModel

# Records of a queue that are looked at for an end before another queue is.
MAX_TRIES = 8


class HitDensityPolicy(EvictionPolicy):
    """Evicts the block that is expected to give the fewest hits for its room and time."""

    name: ClassVar[str] = "hit_density"

    def __init__(self, capacity_blocks: int, history: History, model: ReuseModel, *, bit: int = 1) -> None:
        super().__init__(capacity_blocks, bit=bit)
        self._history = history
        self._model = model
        self._queues = [Queue() for _ in range(N_KINDS)]
        self._held: dict[BlockRecord, Queue] = {}  # and the queue of each
        self._children: dict[BlockRecord, int] = {}  # held blocks that come after a block
        # A heap of (the value of a queue's oldest end or less, the queue's kind); not of all queues.
        self._heads: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._held)

    def serve(self, path: Sequence[BlockRecord]) -> int:
        held, queues = self._held, self._queues
        hits = 0
        for record in path:
            if record not in held:
                break
            hits += 1
        missing: list[BlockRecord] = []
        for record in reversed(path):
            queue = held.get(record)
            if queue is None:
                missing.append(record)
                continue
            kinds_queue = queues[record.kind]
            if kinds_queue is queue:
                queue.move_to_end(record)
            else:
                del queue[record]
                kinds_queue[record] = None
                held[record] = kinds_queue
        if missing:
            self._admit(missing)
        return hits

    def evict(self) -> None:
        self._reset_heads()
        least = self._least()
        self._drop(least[1] if least is not None else self._any_end())

    def check(self) -> None:
        super().check()
        children: dict[BlockRecord, int] = {}
        for record, queue in self._held.items():
            assert record in queue and queue is self._queues[record.kind]
            if record.parent is not None:
                children[record.parent] = children.get(record.parent, 0) + 1
        assert children == self._children

    def _admit(self, missing: Sequence[BlockRecord]) -> None:
        """Take in blocks, given from the end of their chain, as far as each is worth what leaves for it."""
        room, taken = self.capacity_blocks - len(self._held), len(missing)
        if taken > room:
            self._reset_heads()
        for number, record in enumerate(reversed(missing)):
            if number < room:
                continue
            least = self._least()
            if least is None or self._model.value(record.kind, 0) < least[0]:
                taken = number  # those after it are of no use without it
                break
            self._drop(least[1])
        for record in missing[len(missing) - taken :]:
            self._push(record)

    def _push(self, record: BlockRecord) -> None:
        record.held |= self.bit
        queue = self._held[record] = self._queues[record.kind]
        queue[record] = None
        parent = record.parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1

    def _drop(self, record: BlockRecord) -> None:
        del self._held.pop(record)[record]
        self._leave(record)
        parent = record.parent
        if parent is None:
            return
        if self._children[parent] > 1:
            self._children[parent] -= 1
            return
        del self._children[parent]
        queue = self._held.get(parent)  # `parent` is an end now: back from where it was passed over
        if queue is not None and parent.last <= next(iter(queue)).last:
            queue.move_to_end(parent, last=False)

    def _least(self) -> tuple[float, BlockRecord] | None:
        """The value of the block worth least, and the block; None when all are of the chain wanted now."""
        heads, now = self._heads, self._history.now
        while heads:
            value, kind = heads[0]
            record = self._oldest_end(self._queues[kind])
            if record is None or record.last == now:
                heapq.heappop(heads)
                continue
            found = self._model.value(kind, now - record.last)
            if found <= value:
                return found, record
            heapq.heapreplace(heads, (found, kind))
        return None

    def _oldest_end(self, queue: Queue) -> BlockRecord | None:
        """The oldest end in the queue; None when it is not among the first MAX_TRIES records. What is passed
        over becomes the youngest."""
        children = self._children
        for _ in range(min(MAX_TRIES, len(queue))):
            record = next(iter(queue))
            if record not in children:
                return record
            queue.move_to_end(record)
        return None

    def _any_end(self) -> BlockRecord:
        """Some end, however far it is. Every cache has one."""
        return next(record for record in self._held if record not in self._children)

    def _reset_heads(self) -> None:
        self._heads = [(-1.0, kind) for kind, queue in enumerate(self._queues) if queue]

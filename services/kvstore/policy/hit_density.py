"""Least hit density first: LHD, Beckmann, Chen and Cidon, NSDI 2018. Pure.

The value of a block is the hits it is expected to give for the room and time it takes, learned for kinds of
blocks and ages (`policy/reuse.py`). There is a queue for each kind; the oldest blocks of the queues are
compared, and with them a block that would come: one that is worth less than all of them is not taken in.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import ClassVar

from services.kvstore.policy.base import EvictionPolicy, Floats, Ints, Queue
from services.kvstore.policy.history import N_KINDS, BlockRecord, History
from services.kvstore.policy.reuse import ReuseModel, bins_of


class HitDensityPolicy(EvictionPolicy):
    """Evicts the block that is expected to give the fewest hits for its room and time."""

    name: ClassVar[str] = "hit_density"

    def __init__(self, capacity_blocks: int, history: History, model: ReuseModel) -> None:
        super().__init__(capacity_blocks, history)
        self._model = model
        self._queues = [Queue() for _ in range(N_KINDS)]
        # A heap of (the value of a queue's oldest end or less, the queue's kind); not of all queues.
        self._heads: list[tuple[float, int]] = []

    def serve(self, path: Sequence[BlockRecord]) -> list[BlockRecord]:
        held = self.held
        missing = [record for record in path if record not in held]
        if missing:
            for record in reversed(path):
                if record in held:
                    self._hit(record)  # what is wanted now makes no room for the rest of its chain
        self._reset_heads()
        taken, evicted = self._make_room(missing)
        for record in reversed(path):
            if record in held:
                self._hit(record)
            elif record in taken:
                self._miss(record)
        return evicted

    def values(self, kinds: Ints, ages: Ints) -> Floats:
        found: Floats = self._model.values[kinds, bins_of(ages)]
        return found

    def adopt(self, record: BlockRecord) -> None:
        self._push(record, self._queues[record.kind])

    def _hit(self, record: BlockRecord) -> None:
        self._push(record, self._queues[record.kind])

    def _miss(self, record: BlockRecord) -> None:
        self._push(record, self._queues[record.kind])

    def _make_room(self, missing: Sequence[BlockRecord]) -> tuple[set[BlockRecord], list[BlockRecord]]:
        """(blocks to take in, blocks evicted for them): as far as each is worth what goes for it."""
        taken: set[BlockRecord] = set()
        evicted: list[BlockRecord] = []
        for record in missing:
            if len(self) + len(taken) >= self.capacity_blocks:
                least = self._least()
                if least is None or self._model.value(record.kind, 0) < least[0]:
                    break  # those after it are of no use without it
                evicted.append(self._drop(least[1]))
            taken.add(record)
        return taken, evicted

    def _pop_victim(self) -> BlockRecord:
        least = self._least()
        if least is None:
            self._reset_heads()
            least = self._least()
        return self._drop(least[1] if least is not None else self._any_end(self._queues))

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

    def _reset_heads(self) -> None:
        self._heads = [(-1.0, kind) for kind, queue in enumerate(self._queues) if queue]

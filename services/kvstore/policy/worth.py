"""The blocks of a tier by the caches that hold them, those worth least first. Pure.

A block is worth the weights of the caches that hold it. There is a queue for each set of caches, in the order
of the last wants; what no cache holds goes before all else.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.kvstore.policy.history import BlockRecord, Queue


class WorthQueues:
    """The blocks of a tier. Blocks that `next` named, and a reader may hold, are apart until `spared`."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: of the caches, whose bits in `BlockRecord.held` are 1, 2, 4 and so on."""
        self._queues = [Queue() for _ in range(1 << len(weights))]  # by the bits of caches
        self._named = Queue()
        self.weigh(weights)

    def __len__(self) -> int:
        return sum(map(len, (*self._queues, self._named)))

    def weigh(self, weights: Sequence[float]) -> None:
        """Set the weights of the caches."""
        worth = [0.0]
        for weight in weights:
            worth += [weight + other for other in worth]
        worth[0] = -1.0
        self._worth = worth
        self._order = sorted(range(len(worth)), key=worth.__getitem__)

    def enqueue(self, record: BlockRecord) -> Queue:
        """Put a block that the tier has last into the queue of the caches that hold it."""
        if record.queue is not None:
            del record.queue[record]
        queue = record.queue = self._queues[record.held % len(self._queues)]
        queue[record] = None
        return queue

    def remove(self, record: BlockRecord) -> None:
        """Remove a block that the tier has lost."""
        if record.queue is not None:
            del record.queue[record]
            record.queue = None

    def next(self) -> BlockRecord | None:
        """Name the block worth least; None once all are named, and then they are named again."""
        for bits in self._order:
            if self._queues[bits]:
                record, _ = self._queues[bits].popitem(last=False)
                self._named[record], record.queue = None, self._named
                return record
        for record in list(self._named):
            self.enqueue(record)
        return None

    def spared(self, record: BlockRecord) -> None:
        """A block that was named and stays is the next of its queue."""
        if record.queue is self._named:
            self.enqueue(record).move_to_end(record, last=False)

    def kept(self, records: Sequence[BlockRecord], room: int) -> list[BlockRecord]:
        """The blocks that are worth at least what leaves for them, beyond the `room` that is free."""
        worth, order = self._worth, self._order
        lengths = list(map(len, self._queues))
        kept, at = [], 0
        for record in records:
            bits = record.held % len(lengths)
            while at < len(order) - 1 and not lengths[order[at]]:
                at += 1
            if room > 0:
                room -= 1
            elif worth[bits] < worth[order[at]]:
                continue
            else:
                lengths[order[at]] -= 1
            lengths[bits] += 1
            if worth[bits] < worth[order[at]]:
                at = 0
            kept.append(record)
        return kept

    def check(self, record: BlockRecord) -> None:
        """AssertionError unless the block is where it belongs."""
        if record.queue is not None:
            assert record in record.queue
            assert (
                record.queue is self._named or record.queue is self._queues[record.held % len(self._queues)]
            )

"""The interface of eviction policies, and what they share. Pure.

A policy is a cache of records without bytes: it serves chains, holds at most `capacity_blocks` and names what
goes. It serves as the live policy of a tier and as a simulated cache alike. Only ends leave: a block is of no
use without those before it in its chain, so none goes while a block after it is held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from services.kvstore.policy.history import N_KINDS, BlockRecord, History

Queue = OrderedDict[BlockRecord, None]  # the next to go first
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Records of a queue that are looked at for an end before another queue is.
MAX_TRIES = 8
# The weight of one eviction in the mean age at which blocks of a kind leave.
_LIFETIME_WEIGHT = 1 / 64


class EvictionPolicy(ABC):
    """Holds records in queues and says which goes next."""

    name: ClassVar[str]

    def __init__(self, capacity_blocks: int, history: History) -> None:
        self.capacity_blocks = capacity_blocks
        self._history = history
        self.held: dict[BlockRecord, Queue] = {}  # and the queue of each
        self._children: dict[BlockRecord, int] = {}  # held blocks that come after a block
        self._lifetimes = [0.0] * N_KINDS  # the mean age of the evicted; 0: none was

    @abstractmethod
    def _hit(self, record: BlockRecord) -> None:
        """A held block is wanted."""

    @abstractmethod
    def _miss(self, record: BlockRecord) -> None:
        """A block that is not held is wanted, and is taken in."""

    @abstractmethod
    def _pop_victim(self) -> BlockRecord:
        """Choose an end and `_drop` it; at least one block is held."""

    @abstractmethod
    def adopt(self, record: BlockRecord) -> None:
        """Take in a block that the tier has, younger than all that are held."""

    def follow(self, simulated: EvictionPolicy, scale: int) -> None:  # noqa: B027
        """Take over what the simulated cache of this policy, `scale` times smaller, has learned."""

    def __len__(self) -> int:
        return len(self.held)

    def __contains__(self, record: object) -> bool:
        return record in self.held

    def __iter__(self) -> Iterator[BlockRecord]:
        return iter(self.held)

    def count_hits(self, path: Sequence[BlockRecord]) -> int:
        """How many leading blocks of the chain are held."""
        held = self.held
        for at, record in enumerate(path):
            if record not in held:
                return at
        return len(path)

    def serve(self, path: Sequence[BlockRecord]) -> list[BlockRecord]:
        """A chain is wanted and its missing blocks are stored; those that went for them.

        The chain is gone through from its end, so that its start is the most recent."""
        held = self.held
        for record in reversed(path):
            if record in held:
                self._hit(record)
            else:
                self._miss(record)
        return self.trim()

    def trim(self) -> list[BlockRecord]:
        """Evict what is beyond the capacity."""
        return [self.evict() for _ in range(len(self.held) - self.capacity_blocks)]

    def evict(self) -> BlockRecord:
        """Evict the block that goes next; at least one is held."""
        record = self._pop_victim()
        age = self._history.now - record.last
        lifetime = self._lifetimes[record.kind]
        self._lifetimes[record.kind] = lifetime + (age - lifetime) * _LIFETIME_WEIGHT if lifetime else age
        return record

    def values(self, kinds: Ints, ages: Ints) -> Floats:
        """What keeping blocks of these kinds and ages is worth, where no more is known of them: the less the
        larger a part of its kind's lifetime a block has behind it."""
        lifetimes = np.array(self._lifetimes)
        lifetimes[lifetimes == 0] = max(1.0, lifetimes.max())
        found: Floats = -ages / lifetimes[kinds]
        return found

    def release(self) -> None:
        """The policy is used no more."""
        for record in self.held:
            record.holders -= 1
        self.held.clear()

    def check(self) -> None:
        """AssertionError unless sizes and children are counted right."""
        assert len(self) <= max(self.capacity_blocks, 0)
        children: dict[BlockRecord, int] = {}
        for record, queue in self.held.items():
            assert record in queue
            if record.parent is not None:
                children[record.parent] = children.get(record.parent, 0) + 1
        assert children == self._children

    def _push(self, record: BlockRecord, queue: Queue) -> None:
        """Put the block at the young end of a queue, from another queue or from outside."""
        before = self.held.get(record)
        if before is None:
            record.holders += 1
            parent = record.parent
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
        elif before is queue:
            queue.move_to_end(record)
            return
        else:
            del before[record]
        queue[record] = None
        self.held[record] = queue

    def _drop(self, record: BlockRecord) -> BlockRecord:
        del self.held.pop(record)[record]
        record.holders -= 1
        parent = record.parent
        if parent is not None:
            if self._children[parent] == 1:
                del self._children[parent]
            else:
                self._children[parent] -= 1
        return record

    def _oldest_end(self, queue: Queue) -> BlockRecord | None:
        """The oldest end in the queue; None when it is not among the first MAX_TRIES records. What is passed
        over becomes the youngest, as what comes after it is younger, or in another queue."""
        children = self._children
        for record in queue:
            if record not in children:
                return record
            break
        for _ in range(min(MAX_TRIES, len(queue))):
            record = next(iter(queue))
            if record not in children:
                return record
            queue.move_to_end(record)
        return None

    def _any_end(self, queues: Sequence[Queue]) -> BlockRecord:
        """The first end of the first queue that has one, however far it is. Every cache has an end."""
        return next(record for queue in queues for record in queue if record not in self._children)

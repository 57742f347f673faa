"""Order in which a disk reads the blocks of concurrent pins: fair sojourn.

In arrival order, a pin of one block waits for all blocks of a pin of thousands. Round robin delays both of
two long pins to the end of the later one. This order avoids both. It reads pins one after another, sorted by
when each would end if all waiting pins shared the disk equally (Friedman and Henderson, "Fairness and
efficiency in web server protocols", SIGMETRICS 2003). No pin ends later than under equal sharing plus one
block, so none starves. Pins of equal length keep their arrival order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

PinT = TypeVar("PinT", bound=Hashable)


class PinOrder(Generic[PinT]):
    """The blocks that pins wait for, in each pin's order. Several pins may want the same block."""

    def __init__(self) -> None:
        self._queues: dict[PinT, OrderedDict[bytes, None]] = {}  # no queue is empty
        self._ranks: dict[PinT, tuple[float, int, PinT]] = {}  # virtual end and arrival number
        self._ranked: list[tuple[float, int, PinT]] = []  # the ranks, sorted
        self._n_added = 0
        # Virtual time of equal sharing: the blocks that a pin which always waited would have had, and the
        # sorted virtual ends of the pins.
        self._shared_blocks = 0.0
        self._ends: list[float] = []

    def __len__(self) -> int:
        """Number of waiting pins."""
        return len(self._queues)

    def add(self, pin: PinT, keys: Sequence[bytes]) -> None:
        """Add a pin with at least one block. A pin is added once."""
        rank = self._end_of(len(keys)), self._n_added, pin
        self._n_added += 1
        self._queues[pin] = OrderedDict.fromkeys(keys)
        self._ranks[pin] = rank
        insort(self._ranked, rank)
        insort(self._ends, rank[0])

    def first(self) -> bytes | None:
        """The block to read next; None if no pin waits."""
        return next(iter(self._queues[self._ranked[0][2]])) if self._ranked else None

    def begin_read(self, key: bytes, pins: Iterable[PinT]) -> None:
        """Remove the first block because its read starts. `pins`: all pins that want it."""
        self._share(1.0)
        self.discard(key, pins)

    def discard(self, key: bytes, pins: Iterable[PinT]) -> None:
        """Remove the block from these pins, where it is queued."""
        for pin in pins:
            queue = self._queues.get(pin)
            if queue is not None:
                queue.pop(key, None)
                if not queue:
                    self._remove_pin(pin)

    def remove(self, pin: PinT) -> None:
        """Remove a cancelled pin, if it waits, and its virtual share of the disk."""
        if pin in self._queues:
            end = self._ranks[pin][0]
            at = bisect_left(self._ends, end)
            if at < len(self._ends) and self._ends[at] == end:
                del self._ends[at]
            self._remove_pin(pin)

    def _end_of(self, n_blocks: int) -> float:
        return self._shared_blocks + n_blocks

    def _share(self, blocks: float) -> None:
        """Advance the virtual time by `blocks`, shared equally by all virtual pins."""
        while self._ends and blocks > 0:
            to_next_end = (self._ends[0] - self._shared_blocks) * len(self._ends)
            if to_next_end > blocks:
                self._shared_blocks += blocks / len(self._ends)
                return
            blocks -= to_next_end
            self._shared_blocks = self._ends.pop(0)

    def _remove_pin(self, pin: PinT) -> None:
        """Remove a pin whose blocks have been read. Its virtual share lasts until its virtual end."""
        del self._queues[pin]
        del self._ranked[bisect_left(self._ranked, self._ranks.pop(pin))]
        if not self._queues:
            self._ends.clear()
            self._shared_blocks = 0.0

"""Whose blocks a disk reads next: the pin's that would end first if all shared the disk.

First come, first served, a pin of one block waits for all blocks of a pin of thousands. Block by block in
turn, two pins of thousands both end when the second one would have. This order has neither: pins are read
one after another, in the order in which they would end if each that waits had an equal part of the disk
(Friedman and Henderson, "Fairness and efficiency in web server protocols", SIGMETRICS 2003). None ends later
than it would then, but for one block, so none starves; pins of one length are first come, first served.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

PinT = TypeVar("PinT", bound=Hashable)


class PinOrder(Generic[PinT]):
    """The blocks that pins wait for, each pin's in its order. A block may be wanted by several."""

    def __init__(self) -> None:
        self._lines: dict[PinT, OrderedDict[bytes, None]] = {}  # none is empty
        self._places: dict[PinT, tuple[float, int, PinT]] = {}  # where it would end, and its number
        self._ranked: list[tuple[float, int, PinT]] = []  # those, sorted
        self._n_came = 0
        # If all shared the disk: the blocks that one which was always there would have had, and at how
        # many each of the others would end, sorted.
        self._shared_blocks = 0.0
        self._ends: list[float] = []

    def __len__(self) -> int:
        """Pins that wait."""
        return len(self._lines)

    def add(self, pin: PinT, keys: Sequence[bytes]) -> None:
        """The pin waits for these, at least one; once for each pin."""
        place = self._end_of(len(keys)), self._n_came, pin
        self._n_came += 1
        self._lines[pin] = OrderedDict.fromkeys(keys)
        self._places[pin] = place
        insort(self._ranked, place)
        insort(self._ends, place[0])

    def first(self) -> bytes | None:
        """The block to read next; None when none waits."""
        return next(iter(self._lines[self._ranked[0][2]])) if self._ranked else None

    def take(self, key: bytes, pins: Iterable[PinT]) -> None:
        """The first block is being read; `pins`: all that want it."""
        self._share(1.0)
        self.discard(key, pins)

    def discard(self, key: bytes, pins: Iterable[PinT]) -> None:
        """These pins wait for it no longer, if they did."""
        for pin in pins:
            line = self._lines.get(pin)
            if line is not None:
                line.pop(key, None)
                if not line:
                    self._remove(pin)

    def leave(self, pin: PinT) -> None:
        """The pin waits for nothing any more, if it did, and would have no part of the disk."""
        if pin in self._lines:
            end = self._places[pin][0]
            at = bisect_left(self._ends, end)
            if at < len(self._ends) and self._ends[at] == end:
                del self._ends[at]
            self._remove(pin)

    def _end_of(self, n_blocks: int) -> float:
        return self._shared_blocks + n_blocks

    def _share(self, blocks: float) -> None:
        """So much was read: all that would be there had an equal part of it."""
        while self._ends and blocks > 0:
            to_next_end = (self._ends[0] - self._shared_blocks) * len(self._ends)
            if to_next_end > blocks:
                self._shared_blocks += blocks / len(self._ends)
                return
            blocks -= to_next_end
            self._shared_blocks = self._ends.pop(0)

    def _remove(self, pin: PinT) -> None:
        """It waits no longer. What it would have of the disk it has, until it would end."""
        del self._lines[pin]
        del self._ranked[bisect_left(self._ranked, self._places.pop(pin))]
        if not self._lines:
            self._ends.clear()
            self._shared_blocks = 0.0

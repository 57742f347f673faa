"""Limits how many streams leave a draining worker at one time. Pure.

A stream gets no tokens while it moves. With few moves at a time, the other streams keep getting tokens from
the draining worker.
"""

from __future__ import annotations

from collections import Counter

MAX_MOVES = 8


class DrainLimiter:
    """Slots for moves, by worker. A stream releases its slot when it gets tokens again or ends."""

    def __init__(self, *, max_moves: int = MAX_MOVES) -> None:
        self._max_moves = max_moves
        self._moving: Counter[str] = Counter()

    def acquire(self, worker: str) -> bool:
        """Take a slot for a stream that leaves `worker`. Returns False if all slots are taken."""
        if self._moving[worker] >= self._max_moves:
            return False
        self._moving[worker] += 1
        return True

    def release(self, worker: str) -> None:
        """Free a slot."""
        self._moving[worker] -= 1
        if self._moving[worker] <= 0:
            del self._moving[worker]

    @property
    def moving(self) -> int:
        """The number of streams that hold a slot."""
        return self._moving.total()

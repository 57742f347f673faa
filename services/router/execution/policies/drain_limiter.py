"""Limits how many streams leave a draining worker at one time. Pure.

With few of them each stream is without tokens only for its own move, while the others go on where they are.
"""

from __future__ import annotations

from collections import Counter

MAX_MOVES = 8


class DrainLimiter:
    """Slots by worker. A stream releases its slot when it has tokens again, or ended."""

    def __init__(self, *, max_moves: int = MAX_MOVES) -> None:
        self._max_moves = max_moves
        self._moving: Counter[str] = Counter()

    def acquire(self, worker: str) -> bool:
        """Whether a stream may leave `worker` now."""
        if self._moving[worker] >= self._max_moves:
            return False
        self._moving[worker] += 1
        return True

    def release(self, worker: str) -> None:
        """A move is over."""
        self._moving[worker] -= 1
        if self._moving[worker] <= 0:
            del self._moving[worker]

    @property
    def moving(self) -> int:
        """Streams that hold a slot; 0 when idle."""
        return self._moving.total()

"""How many streams leave a worker that drains at one time: few, so that each is without tokens only
for its own move, while the others go on where they are. Pure."""

from __future__ import annotations

from collections import Counter

MAX_MOVES = 8


class DrainLimiter:
    """Slots by worker. Whoever got one gives it back when its stream has tokens again, or ended."""

    def __init__(self, *, max_moves: int = MAX_MOVES) -> None:
        self._max_moves = max_moves
        self._under_way: Counter[str] = Counter()

    def take(self, worker: str) -> bool:
        """Whether a stream may leave `worker` now."""
        if self._under_way[worker] >= self._max_moves:
            return False
        self._under_way[worker] += 1
        return True

    def give_back(self, worker: str) -> None:
        """A move is over."""
        self._under_way[worker] -= 1
        if self._under_way[worker] <= 0:
            del self._under_way[worker]

    @property
    def under_way(self) -> int:
        """Moves not given back; 0 when idle."""
        return self._under_way.total()

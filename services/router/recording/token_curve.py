"""The tokens of one answer over time, in a bounded number of points. Pure."""

from __future__ import annotations

from collections.abc import Sequence

MAX_POINTS = 512


class TokenCurve:
    """Times and cumulative counts. With all points in use, every second one goes and the rest lie twice as
    far apart. So a long answer costs the same memory as a short one."""

    __slots__ = ("_at_s", "_counts", "_max_points", "_skipped", "_stride", "count", "last_s")

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self.count = 0
        self.last_s = 0.0
        self._at_s: list[float] = []
        self._counts: list[int] = []
        self._max_points = max_points
        self._stride = 1  # batches a point
        self._skipped = 0  # batches since the last point

    def add(self, at_s: float, n_tokens: int) -> None:
        """Note a batch of tokens. Times do not fall."""
        self.count += n_tokens
        self.last_s = at_s
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        self._at_s.append(at_s)
        self._counts.append(self.count)
        if len(self._counts) >= self._max_points:
            del self._at_s[-2::-2], self._counts[-2::-2]
            self._stride *= 2

    def points(self) -> tuple[Sequence[float], Sequence[int]]:
        """(times, counts), the last batch included: at most `max_points` of each."""
        if not self._skipped:
            return self._at_s, self._counts
        return [*self._at_s, self.last_s], [*self._counts, self.count]

"""Which blocks are worth a write to the disk: by expected reuse, within a budget of bytes a day. Pure.

Flash wears out by what is written to it. So writes are paid from a bucket that fills at the rate the disk is
meant to bear. While it is at least half full everything is written. Below that only the part of the blocks
that is most likely to be wanted again, the smaller the emptier the bucket is.
"""

from __future__ import annotations

from collections import deque

DAY_MS = 86_400_000.0
# What the bucket holds, in days of its rate: a morning's burst is written, a day of it is not.
BURST_DAYS = 0.25
RECENT = 256


class WriteBudget:
    """Bytes that may be written: `bytes_per_day` on the average, at most BURST_DAYS of it at once."""

    def __init__(self, bytes_per_day: float, *, now_ms: float) -> None:
        if bytes_per_day <= 0:
            raise ValueError("a budget has more than 0 bytes a day")
        self._per_ms = bytes_per_day / DAY_MS
        self._most = bytes_per_day * BURST_DAYS
        self._left = self._most
        self._at_ms = now_ms

    def fill(self, *, now_ms: float) -> float:
        """How full the bucket is, 0 to 1; below 0 after writes beyond it."""
        self._left = min(self._most, self._left + max(0.0, now_ms - self._at_ms) * self._per_ms)
        self._at_ms = max(self._at_ms, now_ms)
        return self._left / self._most

    def has(self, n_bytes: int) -> bool:
        """Whether `n_bytes` were left at the last `fill`."""
        return self._left >= n_bytes

    def spend(self, n_bytes: int) -> None:
        """Take written bytes from the budget, which may fall below zero."""
        self._left -= n_bytes


class DiskAdmission:
    """Decides block by block. No budget: everything is admitted."""

    def __init__(self, budget: WriteBudget | None) -> None:
        self._budget = budget
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.refused_blocks = 0

    @property
    def limited(self) -> bool:
        """Whether it ever refuses."""
        return self._budget is not None

    def admits(self, reuse: float, n_bytes: int, *, now_ms: float) -> bool:
        """Whether to write a block that is wanted again with that probability; what is admitted is spent."""
        if self._budget is None:
            return True
        self._recent.append(reuse)
        fill = self._budget.fill(now_ms=now_ms)
        if not self._budget.has(n_bytes) or reuse < self._least(fill):
            self.refused_blocks += 1
            return False
        self._budget.spend(n_bytes)
        return True

    def forced(self, n_bytes: int) -> None:
        """Take from the budget a block that a caller writes in any case."""
        if self._budget is not None:
            self._budget.spend(n_bytes)

    def _least(self, fill: float) -> float:
        """The reuse to have at that fill: that of the best `2 * fill` of the recent blocks."""
        if fill >= 0.5:
            return 0.0
        ranked = sorted(self._recent)
        return ranked[min(int((1.0 - 2 * max(fill, 0.0)) * len(ranked)), len(ranked) - 1)]

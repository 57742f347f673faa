"""How fast running totals rose lately. Pure."""

from __future__ import annotations

WINDOW_S = 10.0


class RecentRate:
    """The rise of a total over the last one to two windows.

    The process that counts also computes the rate: readers that each did so would not agree.
    """

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._older: tuple[float, float] | None = None  # (time, total), where the rate begins
        self._newer = (0.0, 0.0)

    def per_s(self, now_s: float, total: float) -> float:
        """The rate, with the total as it is now. 0 at the first call."""
        if self._older is None:
            self._older = self._newer = (now_s, total)
        elif now_s - self._newer[0] >= self._window_s:
            self._older, self._newer = self._newer, (now_s, total)
        elapsed_s = now_s - self._older[0]
        return max(total - self._older[1], 0.0) / elapsed_s if elapsed_s > 0 else 0.0

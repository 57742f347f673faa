"""How often a shared stream is written: who comes seldom waits for nothing, who comes often is joined. Pure.

A write costs both ends the same whatever it holds, so under load each should hold much; but a write that
waits for others delays what it holds. This is a token bucket: BURST writes may follow each other at once,
and one more becomes free each REST_S. Who comes when all is quiet waits for nobody who may come in the same
moment.
"""

from __future__ import annotations

REST_S = 0.004
BURST = 4
QUIET_S = 0.016


class WriteLimiter:
    """Of one stream. Times are seconds of one clock that never goes back."""

    def __init__(self) -> None:
        self._full_s = 0.0  # when no write would count any more

    def left_s(self, now_s: float) -> float:
        """How long the next write has to wait."""
        return max(self._full_s - now_s - (BURST - 1) * REST_S, 0.0)

    def is_quiet(self, now_s: float) -> bool:
        """Whether nothing was written for QUIET_S: hardly anybody will come to share a write with."""
        return self._full_s + QUIET_S <= now_s

    def wrote(self, now_s: float) -> None:
        """Now there is a write."""
        self._full_s = max(self._full_s, now_s) + REST_S

"""Health of the pool, derived from the results of its calls. Pure; the caller passes the time, in seconds.

One call that times out or finds no master marks the pool as unavailable, until a probe succeeds. Failing
probes back off. A healthy pool is probed too, at a low rate, since a restarted master may have lost its
values.
"""

from __future__ import annotations

FIRST_PROBE_S = 0.25
MAX_PROBE_S = 2.0
PROBE_EVERY_S = 2.0


class PoolHealth:
    """Unavailable until the first probe succeeds."""

    def __init__(self) -> None:
        self.unavailable = True
        self._pause_s = FIRST_PROBE_S
        self._probe_at_s = 0.0

    def record_failure(self, *, now_s: float) -> bool:
        """Record a failed call or probe; returns whether the pool became unavailable by it."""
        went = not self.unavailable
        self._pause_s = FIRST_PROBE_S if went else min(MAX_PROBE_S, 2 * self._pause_s)
        self.unavailable = True
        self._probe_at_s = now_s + self._pause_s
        return went

    def probe_in_s(self, *, now_s: float) -> float:
        """Time until the next probe; 0 when it is due."""
        return max(0.0, self._probe_at_s - now_s)

    def record_success(self, *, now_s: float) -> bool:
        """Record a successful probe; returns whether the pool came back by it."""
        self._probe_at_s = now_s + PROBE_EVERY_S
        came, self.unavailable = self.unavailable, False
        return came

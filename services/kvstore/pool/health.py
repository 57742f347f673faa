"""Whether the pool is of use now, from how its calls end. Pure; time is given, in seconds.

One call that does not end in time, or that finds no master, and the pool is away: nobody waits for it until
a probe has ended well. Probes come less and less often, and seldom while all is well: a master that was
started anew may have forgotten what was put.
"""

from __future__ import annotations

FIRST_PROBE_S = 0.25
MAX_PROBE_S = 2.0
LOOK_EVERY_S = 2.0


class PoolHealth:
    """Away until the first probe or start has ended well."""

    def __init__(self) -> None:
        self.away = True
        self._pause_s = FIRST_PROBE_S
        self._probe_at_s = 0.0

    def failed(self, *, now_s: float) -> bool:
        """A call or a probe failed; whether the pool went away just now."""
        went = not self.away
        self._pause_s = FIRST_PROBE_S if went else min(MAX_PROBE_S, 2 * self._pause_s)
        self.away = True
        self._probe_at_s = now_s + self._pause_s
        return went

    def probe_in_s(self, *, now_s: float) -> float:
        """How long until the next probe; 0 when it is due."""
        return max(0.0, self._probe_at_s - now_s)

    def answered(self, *, now_s: float) -> bool:
        """A probe ended well; whether the pool came back just now."""
        self._probe_at_s = now_s + LOOK_EVERY_S
        came, self.away = self.away, False
        return came

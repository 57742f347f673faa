"""How often a place becomes free, measured while requests wait. Pure; times in milliseconds."""

from __future__ import annotations

# Sequences of one batch end together, so the mean covers many ends.
_END_DECAY = 0.97


class EndPace:
    """The mean time between ends of requests, with decaying weights."""

    def __init__(self) -> None:
        self._last_end_ms: float | None = None
        self._between_ms, self._ends = 0.0, 0.0

    def observe(self, now_ms: float, *, is_waited_for: bool) -> None:
        """A request has ended. Only while others wait does an end admit another one."""
        if is_waited_for and self._last_end_ms is not None:
            self._between_ms = _END_DECAY * self._between_ms + now_ms - self._last_end_ms
            self._ends = _END_DECAY * self._ends + 1.0
        self._last_end_ms = now_ms if is_waited_for else None

    @property
    def mean_ms(self) -> float | None:
        """The mean time between two ends; None before two ends."""
        return self._between_ms / self._ends if self._ends else None

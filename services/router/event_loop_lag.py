"""Measures the event loop's delay, which shows whether a router process has enough CPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from libs.common.telemetry.recent_rate import RecentRate

INTERVAL_S = 0.1
WINDOW_S = 10.0
# Of Linux: nanoseconds that the reading thread ran and waited for a core, and how often it ran.
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def wanted_s(schedstat: str, ran_s: float) -> float:
    """How long a thread ran or waited for a core. Pure. `schedstat`: "" or zeros where there is none."""
    ran_ns, waited_ns = [int(field) for field in schedstat.split()[:2]] or (0, 0)
    return max((ran_ns + waited_ns) / 1e9, ran_s)


def _thread_wanted_s() -> float:
    """The time that the calling thread wanted a processor."""
    try:
        schedstat = _SCHEDSTAT.read_text()
    except OSError:
        schedstat = ""
    return wanted_s(schedstat, time.thread_time())


class LagWindow:
    """Mean and maximum delay of the last one to two windows, milliseconds. Pure."""

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._began_s: float | None = None
        self._last: list[float] = []
        self._now: list[float] = []

    def add(self, now_s: float, delay_ms: float) -> None:
        """One sample."""
        if self._began_s is None or now_s - self._began_s >= self._window_s:
            self._began_s, self._last, self._now = now_s, self._now, []
        self._now.append(delay_ms)

    @property
    def mean_ms(self) -> float:
        """0 before the first sample."""
        samples = [*self._last, *self._now]
        return sum(samples) / len(samples) if samples else 0.0

    @property
    def max_ms(self) -> float:
        """0 before the first sample."""
        return max([*self._last, *self._now], default=0.0)


class EventLoopLag:
    """Measures the running loop: how much later than asked a timer fires. `start`, then `close`."""

    def __init__(self, clock: Callable[[], float], *, wanted: Callable[[], float] = _thread_wanted_s) -> None:
        """`wanted`: how long the calling thread ran or waited for a core."""
        self.window = LagWindow()
        self._clock = clock
        self._wanted = wanted
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._busy = RecentRate()

    def start(self) -> None:
        """Begin."""
        self._due_s = self._clock() + INTERVAL_S
        self._timer = asyncio.get_running_loop().call_at(self._due_s, self._fire)

    def close(self) -> None:
        """End. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def busy_share(self) -> float:
        """The share of recent time that the loop's thread ran or waited for a core; it has to call.

        By its CPU time alone a router that gets too little of it would look idle.
        """
        return min(self._busy.per_s(self._clock(), self._wanted()), 1.0)

    def gauges(self) -> dict[str, float]:
        """The gauges for the table of metrics."""
        return {
            "slipstream_event_loop_delay_seconds": round(self.window.mean_ms / 1e3, 6),
            "slipstream_event_loop_delay_max_seconds": round(self.window.max_ms / 1e3, 6),
        }

    def _fire(self) -> None:
        now_s = self._clock()
        self.window.add(now_s, max(0.0, now_s - self._due_s) * 1e3)
        self.start()

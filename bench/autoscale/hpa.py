"""Kubernetes' horizontal pod autoscaler as far as it decides: formula, tolerance, windows, policy. Pure.

For a metric of type AverageValue, as KEDA makes it: `total` over all replicas, `target` for each one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

PERIOD_S = 15.0
TOLERANCE = 0.1


@dataclass(slots=True)
class HpaController:
    """One HPA with the default behaviour: up at once, by 4 or to the double; down after `down_window_s`."""

    least: int
    most: int
    down_window_s: float = 300.0
    up_window_s: float = 0.0
    _recommended: deque[tuple[float, int]] = field(default_factory=deque)

    def step(self, now_s: float, *, replicas: int, total: float, target: float = 1.0) -> int:
        """The replicas that it sets now. To be called every PERIOD_S."""
        wanted = replicas
        if abs(1.0 - total / (target * replicas)) > TOLERANCE:
            wanted = math.ceil(total / target)
        self._recommended.append((now_s, wanted))
        while self._recommended[0][0] <= now_s - max(self.down_window_s, self.up_window_s):
            self._recommended.popleft()
        up = min(n for at_s, n in self._recommended if at_s > now_s - self.up_window_s or at_s == now_s)
        down = max(n for at_s, n in self._recommended if at_s > now_s - self.down_window_s)
        stable = replicas
        if stable < up:
            stable = min(up, max(replicas + 4, replicas * 2))
        if stable > down:
            stable = down
        return min(max(stable, self.least), self.most)

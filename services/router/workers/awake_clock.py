"""A clock that advances only while this router's event loop runs; it measures how long a worker is silent.

A router that was stopped, starved or suspended receives nothing meanwhile. That is no fault of the workers:
their reports wait in the router's sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_S = 0.1
# The most that one iteration of the loop may add; anything longer was the router's own standstill.
LONGEST_ITERATION_S = 0.5


class AwakeClock:
    """Seconds that never jump: follows `clock` (monotonic) while `tick` is called every `TICK_S`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ticked_s = clock()
        self._awake_s = 0.0

    def now_s(self) -> float:
        """Never falls, and between two ticks rises by LONGEST_ITERATION_S at most."""
        iteration_s = self._clock() - self._ticked_s
        if iteration_s > LONGEST_ITERATION_S:
            iteration_s = LONGEST_ITERATION_S
        elif iteration_s < 0.0:
            iteration_s = 0.0
        return self._awake_s + iteration_s

    def tick(self) -> None:
        """The loop completed an iteration."""
        self._awake_s = self.now_s()
        self._ticked_s = self._clock()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

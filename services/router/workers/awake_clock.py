"""How long a worker has been silent, measured in time during which this process itself was awake.

A router that was stopped, starved or suspended hears from nobody meanwhile, and that is no fault of
the workers: what they said waits in its sockets. So silence is measured on a clock that goes on only
while the router's own event loop turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_S = 0.1
# The most that one turn of the loop may add; anything longer was the router's own standstill.
LONGEST_TURN_S = 0.5


class AwakeClock:
    """Seconds that never jump: follows `clock` (monotonic) while `tick` is called every `TICK_S`."""

    def __init__(self, clock: Callable[[], float], *, longest_turn_s: float = LONGEST_TURN_S) -> None:
        self._clock = clock
        self._longest_turn_s = longest_turn_s
        self._ticked_s = clock()
        self._awake_s = 0.0

    def now_s(self) -> float:
        """Never falls, and between two ticks rises by `longest_turn_s` at most."""
        turn_s = self._clock() - self._ticked_s
        if turn_s > self._longest_turn_s:
            turn_s = self._longest_turn_s
        elif turn_s < 0.0:
            turn_s = 0.0
        return self._awake_s + turn_s

    def tick(self) -> None:
        """The loop turned."""
        self._awake_s = self.now_s()
        self._ticked_s = self._clock()

    async def run(self) -> None:
        """Tick for ever."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

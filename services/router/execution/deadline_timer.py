"""When requests have to be over: one timer for all of them, which most never see fire."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

# The timer looks at all requests each time: not more often than this, so that many deadlines that follow
# each other closely cost little.
LEAST_PAUSE_S = 0.01

Item = TypeVar("Item", bound=Hashable)


class DeadlineTimer(Generic[Item]):
    """Calls `passed` with each item whose deadline comes before it is removed, within LEAST_PAUSE_S."""

    def __init__(self, passed: Callable[[Item], None]) -> None:
        self._passed = passed
        self._deadlines_s: dict[Item, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_s = math.inf  # when the timer fires

    def add(self, item: Item, deadline_s: float) -> None:
        """`deadline_s` is on the event loop's clock."""
        self._deadlines_s[item] = deadline_s
        if deadline_s < self._looks_s:
            self._arm(deadline_s)

    def remove(self, item: Item) -> None:
        """It is over. Idempotent."""
        self._deadlines_s.pop(item, None)

    def close(self) -> None:
        """No more of them."""
        self._deadlines_s.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._looks_s = None, math.inf

    def _arm(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks_s = at_s
        self._timer = asyncio.get_running_loop().call_at(at_s, self._look)

    def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._timer, self._looks_s = None, math.inf
        for item in [item for item, deadline_s in self._deadlines_s.items() if deadline_s <= now_s]:
            del self._deadlines_s[item]
            self._passed(item)
        if self._deadlines_s:
            self._arm(max(min(self._deadlines_s.values()), now_s + LEAST_PAUSE_S))

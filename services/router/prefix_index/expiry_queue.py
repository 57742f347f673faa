"""When to look at runs of blocks again, to the second. Pure.

A run stands in the list of its second alone and leaves it with one deletion: however many runs there are and
however often they change, nothing stale is left that some caller would have to clear away at once.
"""

from __future__ import annotations

import heapq
import math

from services.router.prefix_index.radix_node import RadixNode

_AT_ONCE_S = -math.inf


class ExpiryQueue:
    """Which of some runs are to be looked at, and when; a run's `due_s` says so too."""

    def __init__(self) -> None:
        self._runs: dict[float, dict[RadixNode, None]] = {}  # by second
        self._seconds: list[float] = []  # a heap of the keys of `_runs`

    def soon(self, run: RadixNode) -> None:
        """At the next chance."""
        self.no_later(run, _AT_ONCE_S)

    def no_later(self, run: RadixNode, due_s: float) -> None:
        """Then, rounded up, if not sooner. Seconds, on the caller's clock."""
        second = due_s if due_s == _AT_ONCE_S else float(math.ceil(due_s))
        if run.due_s is not None and run.due_s <= second:
            return
        self.leave(run)
        run.due_s = second
        runs = self._runs.get(second)
        if runs is None:
            runs = self._runs[second] = {}
            heapq.heappush(self._seconds, second)
        runs[run] = None

    def leave(self, run: RadixNode) -> None:
        """It is not looked at."""
        if run.due_s is not None:
            del self._runs[run.due_s][run]
            run.due_s = None

    def any(self, now_s: float) -> bool:
        """Whether one is to be looked at by now."""
        while self._seconds and self._seconds[0] <= now_s:
            if self._runs[self._seconds[0]]:
                return True
            del self._runs[heapq.heappop(self._seconds)]
        return False

    def pop(self) -> RadixNode:
        """One of the first second that has any, after `any` said so; it leaves."""
        run, _ = self._runs[self._seconds[0]].popitem()
        run.due_s = None
        return run

    def holds(self, run: RadixNode) -> bool:
        """Whether the run's `due_s` is where it stands."""
        return run.due_s is None or run in self._runs.get(run.due_s, ())

    def __len__(self) -> int:
        return sum(map(len, self._runs.values()))

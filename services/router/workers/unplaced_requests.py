"""Counts the requests that found no worker, which is what wakes a tier without workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REMEMBERED_S = 60.0
_MOST_REMEMBERED = 1024


class UnplacedRequests:
    """The requests that wait for a worker now, and those that gave up within the last minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.n_waiting = 0  # those that wait now
        self._gave_up_s: deque[float] = deque(maxlen=_MOST_REMEMBERED)

    @property
    def count(self) -> int:
        """How many there are."""
        since_s = self._clock() - REMEMBERED_S
        while self._gave_up_s and self._gave_up_s[0] < since_s:
            self._gave_up_s.popleft()
        return self.n_waiting + len(self._gave_up_s)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A request waits inside the block, and gave up when the block raises."""
        self.n_waiting += 1
        try:
            yield
        except BaseException:
            self._gave_up_s.append(self._clock())
            raise
        finally:
            self.n_waiting -= 1

"""The bounded queue between callers and the threads of the database."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from libs.database.transaction import SqlTransaction
from slipstream.errors import Overloaded


@dataclass(eq=False, slots=True)
class DatabaseWork:
    """One transaction to run. `deadline_s` is of the monotonic clock."""

    run: Callable[[SqlTransaction], Any]
    deadline_s: float
    is_idempotent: bool = False
    future: Future[Any] = field(default_factory=Future)


class WorkQueue:
    """First in, first out. Safe for threads."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[DatabaseWork] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, work: DatabaseWork) -> None:
        """Add work. Raises Overloaded when the queue is full, RuntimeError after `close`."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the database is closed")
            if len(self._waiting) >= self._max_waiting:
                raise Overloaded("too many transactions wait for the database")
            self._waiting.append(work)
            self._changed.notify()

    def take(self, most: int) -> list[DatabaseWork]:
        """The next items of work, waiting for one; none after `close`, once all are done."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def close(self) -> None:
        """Take no more work. What waits is still done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

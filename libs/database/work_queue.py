"""The bounded queue between callers and the threads of the database, fair between tenants."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from libs.database.transaction import SqlTransaction
from slipstream.errors import Overloaded


@dataclass(eq=False, slots=True)
class DatabaseWork:
    """One transaction to run. `deadline_s` is of the monotonic clock; `tenant` "": of no tenant.

    `adds_content`: it is refused where the disk is nearly full.
    """

    run: Callable[[SqlTransaction], Any]
    deadline_s: float
    is_idempotent: bool = False
    tenant: str = ""
    adds_content: bool = False
    future: Future[Any] = field(default_factory=Future)

    def begin(self) -> bool:
        """Whether the thread runs the work. Work that was put back has begun; cancelled work does not run."""
        return self.future.running() or self.future.set_running_or_notify_cancel()


class WorkQueue:
    """One item of each tenant in turn; of one tenant first in, first out. Safe for threads."""

    def __init__(self, max_waiting: int) -> None:
        """A tenant alone may have half of what waits."""
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[str, deque[DatabaseWork]] = OrderedDict()  # whose turn it is first
        self._count = 0
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return self._count

    def put(self, work: DatabaseWork) -> None:
        """Add work. Raises Overloaded when the queue is full, RuntimeError after `close`."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the database is closed")
            of_tenant = self._waiting.get(work.tenant, ())
            is_full = bool(work.tenant) and 2 * len(of_tenant) >= self._max_waiting
            if is_full or self._count >= self._max_waiting:
                raise Overloaded("too many transactions wait for the database")
            self._waiting.setdefault(work.tenant, deque()).append(work)
            self._count += 1
            self._changed.notify()

    def put_back(self, works: Sequence[DatabaseWork]) -> None:
        """Queue a taken item again, before later items of its tenant."""
        with self._changed:
            for work in reversed(works):
                self._waiting.setdefault(work.tenant, deque()).appendleft(work)
                self._count += 1
            self._changed.notify()

    def take(self, most: int) -> list[DatabaseWork]:
        """The next items of work, waiting for one; none after `close`, once all are done."""
        with self._changed:
            while not self._count and not self._closed:
                self._changed.wait()
            return [self._next() for _ in range(min(most, self._count))]

    def _next(self) -> DatabaseWork:
        tenant, works = self._waiting.popitem(last=False)
        work = works.popleft()
        if works:
            self._waiting[tenant] = works
        self._count -= 1
        return work

    def close(self) -> None:
        """Take no more work. What waits is still done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

"""The order in which the grammars of a worker's tenants are compiled. Pure."""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class CompileQueue(Generic[T]):
    """Work that waits and work that runs, by tenant.

    A compile takes up to seconds, and nothing interrupts it. So one tenant runs at most `most_running` at a
    time: with a thread more there is one for the others. The tenant that runs the fewest goes first, of those
    the one that began the longest ago.
    """

    def __init__(self, *, most_running: int) -> None:
        self._most_running = most_running
        self._waiting: dict[bytes, deque[T]] = {}  # by tenant; the one that began last is the last
        self._running: Counter[bytes] = Counter()

    def add(self, tenant: bytes, work: T) -> None:
        """Let it wait behind the tenant's other work."""
        self._waiting.setdefault(tenant, deque()).append(work)

    def begin(self) -> tuple[bytes, T] | None:
        """The work to run now, with its tenant; None where none may. It runs until `end`."""
        ready = [tenant for tenant in self._waiting if self._running[tenant] < self._most_running]
        if not ready:
            return None
        tenant = min(ready, key=self._running.__getitem__)
        works = self._waiting.pop(tenant)
        work = works.popleft()
        if works:
            self._waiting[tenant] = works
        self._running[tenant] += 1
        return tenant, work

    def end(self, tenant: bytes) -> None:
        """Note that a piece of the tenant's work runs no more."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def clear(self) -> list[T]:
        """Let nothing wait; what waited."""
        dropped = [work for works in self._waiting.values() for work in works]
        self._waiting.clear()
        return dropped

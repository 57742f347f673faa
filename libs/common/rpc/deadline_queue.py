"""Deadlines of many things that may each take equally long, with one timer for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeAlias, TypeVar

Item = TypeVar("Item", bound=Hashable)


class DeadlineQueue(Generic[Item]):
    """Calls `passed` with each item that is not removed within `delay_s` seconds. Made on an event loop.

    A timer of asyncio for each item costs a call 10 us, and nearly none fires.
    """

    def __init__(self, delay_s: float, passed: Callable[[Item], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._delay_s = delay_s
        self._passed = passed
        self._due_s: dict[Item, float] = {}  # in the order of their deadlines
        self._has_timer = False

    def add(self, item: Item) -> None:
        """Begin the time of an item that is not in the queue."""
        due_s = self._due_s[item] = self._loop.time() + self._delay_s
        if not self._has_timer:
            self._arm(due_s)

    def remove(self, item: Item) -> None:
        """End the time of an item. Idempotent."""
        self._due_s.pop(item, None)

    def _arm(self, due_s: float) -> None:
        self._has_timer = True
        self._loop.call_at(due_s, self._look)

    def _look(self) -> None:
        """Pass on what is due. The timer ends without items, and waits for the first one otherwise."""
        self._has_timer = False
        now_s = self._loop.time()
        for item in [item for item, due_s in self._due_s.items() if due_s <= now_s]:
            if self._due_s.pop(item, None) is not None:  # `passed` may remove others
                self._passed(item)
        if self._due_s and not self._has_timer:
            self._arm(next(iter(self._due_s.values())))


# The deadlines of calls, by the tasks that handle them.
HandlerDeadlines: TypeAlias = DeadlineQueue[asyncio.Task[Any]]

"""Items of many tenants in fair order by the time that each tenant's items took. Pure.

Start-time fair queueing, as in admission/fair_queue.py, for costs that are known only afterwards. The tenant
with the lowest tag goes next, and what its item took moves its tag on. A tenant that returns starts at
virtual time, with no credit and no debt. While two tenants have items, their times differ by at most one item
of each. Every operation takes a time that grows with the logarithm of the number of tenants.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

_KEPT_TAGS = 64


class TenantFairQueue(Generic[T]):
    """Each `pop` is followed by the `charge` of its tenant."""

    def __init__(self) -> None:
        self._items: dict[Hashable, deque[T]] = {}  # of tenants that have some
        self._tags: dict[Hashable, float] = {}
        # One entry for each tenant with items, but for the one whose item was popped and is not charged yet.
        self._heap: list[tuple[float, int, Hashable]] = []
        self._arrivals = 0  # breaks ties, so that no two tenants are compared
        self._virtual = 0.0
        self._n_items = 0

    def __len__(self) -> int:
        return self._n_items

    def push(self, tenant: Hashable, item: T) -> None:
        """Add an item behind the others of its tenant."""
        self._n_items += 1
        waiting = self._items.get(tenant)
        if waiting is not None:
            waiting.append(item)
            return
        self._items[tenant] = deque((item,))
        self._drop_reached_tags()
        self._tags[tenant] = max(self._tags.get(tenant, 0.0), self._virtual)
        self._enter(tenant)

    def pop(self) -> tuple[Hashable, T]:
        """The next item and its tenant. Raises IndexError where there is none."""
        self._virtual, _, tenant = heapq.heappop(self._heap)
        self._n_items -= 1
        return tenant, self._items[tenant].popleft()

    def charge(self, tenant: Hashable, took: float) -> None:
        """Count what the tenant's last item took."""
        self._tags[tenant] += took
        if self._items[tenant]:
            self._enter(tenant)
            return
        del self._items[tenant]
        if not self._items:
            self._tags.clear()
            self._virtual = 0.0

    def _drop_reached_tags(self) -> None:
        """Drop the tags of tenants without items that virtual time has reached: they would begin there."""
        if len(self._tags) > 2 * len(self._items) + _KEPT_TAGS:
            self._tags = {t: tag for t, tag in self._tags.items() if tag > self._virtual or t in self._items}

    def _enter(self, tenant: Hashable) -> None:
        self._arrivals += 1
        heapq.heappush(self._heap, (self._tags[tenant], self._arrivals, tenant))

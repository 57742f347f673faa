"""Starts a few requests in each iteration of the event loop, tenant by tenant, and of each in order.

Without pacing, the event loop would encode all requests of a burst before it places and sends the first one.
With pacing, the first prefills run while the router encodes later requests. First tokens reach their clients
between two iterations. Requests whose worker was lost start so, too: it may have had hundreds.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

# More than one, so that one message carries the prompts of several requests to a worker.
PER_ITERATION = 4


class StartPacer:
    """Limits starts: each request awaits `acquire` before its work."""

    def __init__(self, *, per_iteration: int = PER_ITERATION) -> None:
        self._per_iteration = per_iteration
        self._left = per_iteration
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # whose turn it is first
        self._armed = False

    async def acquire(self, tenant: str) -> None:
        """Return at once if this iteration has a start left, else in a later iteration."""
        if self._left:  # then none waits
            self._left -= 1
            self._arm()
            return
        slot = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(slot)
        await slot

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._armed, self._left = False, self._per_iteration
        while self._waiting and self._left:
            tenant, slots = self._waiting.popitem(last=False)
            slot = slots.popleft()
            if slots:
                self._waiting[tenant] = slots
            if not slot.done():  # else its task was cancelled
                slot.set_result(None)
                self._left -= 1
        if self._left < self._per_iteration:
            self._arm()

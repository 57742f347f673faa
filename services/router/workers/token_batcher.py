"""When new tokens are handed on to the requests they belong to: at once while the router is idle, in batches
when it is busy.

Handing a token on costs the same whether one or fifty go together: a task wakes, a message is encoded
and written. `TokenBatcher` measures how long the event loop takes to serve one round (everything that was
due, to the written messages) and lets the next round begin no earlier than `REST` times that later, so
that the loop always has time left to read. What arrives meanwhile joins. A lone stream never waits; a
thousand streams get fewer, larger messages instead of a growing queue. No round waits longer than
MAX_PAUSE_S.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

REST = 4.0
MAX_PAUSE_S = 0.05
# A woken task runs in the next turn of the loop, the face it feeds in the one after, its write after that.
_TURNS_OF_A_ROUND = 3


class PendingDelivery(Protocol):
    """Something with news for a task."""

    def deliver(self) -> None:
        """Wake the task."""


class TokenBatcher:
    """Rounds of deliveries on the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: list[PendingDelivery] = []
        self._began_s = 0.0
        self._next_s = 0.0
        self._last_pause_s = 0.0
        self.pause_s = 0.0  # between rounds now; a single long one does not count
        self._running = False  # a round is due or under way
        self.rounds = 0

    def mark(self, item: PendingDelivery) -> None:
        """`item` has news; the caller marks it once until it was delivered."""
        self._due.append(item)
        if not self._running:
            self._schedule()

    def _schedule(self) -> None:
        self._running = True
        if self._next_s <= self._loop.time():
            self._loop.call_soon(self._round)
        else:
            self._loop.call_at(self._next_s, self._round)

    def _round(self) -> None:
        self._began_s = self._loop.time()
        self.rounds += 1
        due, self._due = self._due, []
        for item in due:
            item.deliver()
        self._loop.call_soon(self._turn, 1)

    def _turn(self, number: int) -> None:
        if number < _TURNS_OF_A_ROUND:
            self._loop.call_soon(self._turn, number + 1)
            return
        took_s = self._loop.time() - self._began_s
        pause_s = min(took_s * REST, MAX_PAUSE_S)
        self.pause_s, self._last_pause_s = min(pause_s, self._last_pause_s), pause_s
        self._next_s = self._began_s + pause_s
        self._running = False
        if self._due:
            self._schedule()

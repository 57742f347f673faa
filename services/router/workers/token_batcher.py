"""Decides when new tokens are delivered: at once while the router is idle, in batches when it is busy.

To deliver costs the same for one token and for fifty: a delta is encoded and written. `TokenBatcher`
measures how long the event loop takes for one round (all that was due, up to the written messages), and
begins the next round PAUSE_ROUNDS times that later, so that the loop has time left to read. Tokens that
arrive meanwhile are joined. A lone stream never waits; a thousand streams get fewer, larger messages instead
of a growing queue. No round waits longer than MAX_PAUSE_S.

The policy beside it, for requests that begin, is execution/policies/start_pacer.py.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

PAUSE_ROUNDS = 4.0
MAX_PAUSE_S = 0.05
# A handler that a round wakes runs in the loop's next iteration, its write in the one after.
_ITERATIONS_OF_A_ROUND = 3


class PendingDelivery(Protocol):
    """Something with tokens to deliver."""

    def deliver(self) -> None:
        """Push the tokens."""


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
        """Deliver `item` in the next round. The caller marks it once until it is delivered."""
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
        self._loop.call_soon(self._measure, 1)

    def _measure(self, number: int) -> None:
        if number < _ITERATIONS_OF_A_ROUND:
            self._loop.call_soon(self._measure, number + 1)
            return
        took_s = self._loop.time() - self._began_s
        pause_s = min(took_s * PAUSE_ROUNDS, MAX_PAUSE_S)
        self.pause_s, self._last_pause_s = min(pause_s, self._last_pause_s), pause_s
        self._next_s = self._began_s + pause_s
        self._running = False
        if self._due:
            self._schedule()

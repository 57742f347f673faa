"""Decides when new tokens are delivered: at once while the router is idle, in batches when it is busy.

To deliver costs the same for one token and for fifty: a delta is encoded and written. `TokenBatcher` measures
how long the event loop takes for one round (all that was due, up to the written messages). It begins the next
round PAUSE_ROUNDS times that later, so the loop has time left to read. Tokens that arrive meanwhile are
joined. A lone stream never waits; a thousand streams get fewer, larger messages instead of a growing queue.
No round waits longer than MAX_PAUSE_S.

A round runs in slices, one for each iteration of the event loop, and tenants share the slices by time. So a
request that begins waits for a slice at each of its steps, not for the answers of another tenant's streams.

The policy beside it, for requests that begin, is execution/policies/start_pacer.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

from services.router.workers.delivery.late_rows import LateRows
from services.router.workers.delivery.tenant_fair_queue import TenantFairQueue

T = TypeVar("T")

PAUSE_ROUNDS = 4.0
MAX_PAUSE_S = 0.05
# Deliveries take so much of one iteration of the event loop. A request begins in about ten iterations.
SLICE_S = 0.002
# Deliveries that are so late slow down the reading of frames, which join more tokens then.
MAX_BACKLOG_S = 1.0
# A frame that waits has tokens of tenants, too, whose deliveries are not late.
MAX_STOP_S = 0.05
# A handler that a round wakes runs in the loop's next iteration, its write in the one after.
_ITERATIONS_OF_A_ROUND = 3


class PendingDelivery(Protocol):
    """Something with tokens to deliver."""

    @property
    def tenant(self) -> Hashable:
        """The tenant of the tokens."""

    def deliver(self) -> None:
        """Push the tokens."""


class _TaskWork:
    """A function that a task waits for."""

    def __init__(self, work: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        self._work = work
        self._done = done

    def deliver(self) -> None:
        if self._done.done():  # the task was cancelled
            return
        try:
            self._done.set_result(self._work())
        except Exception as error:
            self._done.set_exception(error)


class TokenBatcher:
    """Rounds of deliveries on the running event loop, for all streams of a router."""

    def __init__(self, *, clock: Callable[[], float] | None = None) -> None:
        """`clock`: that of the running event loop, unless a test has another one."""
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._due: list[PendingDelivery] = []
        self._queue: TenantFairQueue[PendingDelivery | _TaskWork] = TenantFairQueue()
        self._is_slicing = False  # the next slice is scheduled
        self._behind_since_s = 0.0  # when the queue was empty for the last time
        self._caught_up: asyncio.Future[None] | None = None
        self._spent_s = 0.0  # in this iteration of the loop
        self._began_s = 0.0
        self._next_s = 0.0
        self._last_pause_s = 0.0
        self.pause_s = 0.0  # between rounds now; a single long one does not count
        self._running = False  # a round is due or under way
        self._has_items = False  # some of its items are not delivered
        self.rounds = 0
        self.late_rows = LateRows()

    def mark(self, item: PendingDelivery) -> None:
        """Deliver `item` in the next round. The caller marks it once until it is delivered."""
        self._due.append(item)
        if not self._running:
            self._schedule()

    async def run(self, tenant: Hashable, work: Callable[[], T]) -> T:
        """The result of a short function, at once or in the order of the tenants."""
        if self._is_slicing or self._spent_s >= SLICE_S:
            done: asyncio.Future[T] = self._loop.create_future()
            self._push(tenant, _TaskWork(work, done))
            return await done
        began_s = self._clock()
        try:
            return work()
        finally:
            self._spend(self._clock() - began_s)

    async def caught_up(self) -> None:
        """Return at once, or when late deliveries are made, but after MAX_STOP_S at most."""
        if self._is_slicing and self._clock() - self._behind_since_s > MAX_BACKLOG_S:
            if self._caught_up is None:
                self._caught_up = self._loop.create_future()
            await asyncio.wait([self._caught_up], timeout=MAX_STOP_S)

    # ---- rounds

    def _schedule(self) -> None:
        self._running = True
        if self._next_s <= self._clock():
            self._loop.call_soon(self._round)
        else:
            self._loop.call_at(self._next_s, self._round)

    def _round(self) -> None:
        self._began_s = self._clock()
        self.rounds += 1
        self._has_items = True
        due, self._due = self._due, []
        for item in due:
            self._queue.push(item.tenant, item)
        if not self._is_slicing:
            self._behind_since_s = self._began_s
            self._slice()

    def _measure(self, number: int) -> None:
        if number < _ITERATIONS_OF_A_ROUND:
            self._loop.call_soon(self._measure, number + 1)
            return
        took_s = self._clock() - self._began_s
        pause_s = min(took_s * PAUSE_ROUNDS, MAX_PAUSE_S)
        self.pause_s, self._last_pause_s = min(pause_s, self._last_pause_s), pause_s
        self._next_s = self._began_s + pause_s
        self._running = False
        if self._due:
            self._schedule()

    # ---- slices

    def _push(self, tenant: Hashable, item: _TaskWork) -> None:
        self._queue.push(tenant, item)
        if not self._is_slicing:
            self._is_slicing, self._behind_since_s = True, self._clock()
            self._loop.call_soon(self._slice)

    def _slice(self) -> None:
        """Deliver for SLICE_S, then let the loop do what else is due."""
        now_s = self._clock()
        end_s = now_s + SLICE_S - self._spent_s
        while self._queue:
            tenant, item = self._queue.pop()
            item.deliver()
            began_s, now_s = now_s, self._clock()
            self._queue.charge(tenant, now_s - began_s)
            self._spend(now_s - began_s)
            if now_s >= end_s:
                break
        self._is_slicing = bool(self._queue)
        if self._is_slicing:
            self._loop.call_soon(self._slice)
            if self._due and self._has_items and now_s - self._began_s >= MAX_PAUSE_S:
                self._round()  # a round that takes long is joined by the next one
            return
        if self._caught_up is not None:
            self._caught_up.set_result(None)
            self._caught_up = None
        if self._has_items:
            self._has_items = False
            self._loop.call_soon(self._measure, 1)

    def _spend(self, spent_s: float) -> None:
        if not self._spent_s:
            self._loop.call_soon(self._begin_iteration)
        self._spent_s += spent_s

    def _begin_iteration(self) -> None:
        self._spent_s = 0.0

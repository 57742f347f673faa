"""Runs pieces of CPU work on a few threads, in fair order between tenants.

Long messages are parsed, checked and encoded here, so that the event loop never stands still for one. A piece
is short (at most a body, or 400,000 characters of text), because it cannot be interrupted. A cancelled caller
leaves at most one running piece behind, and other tenants wait for one piece at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

from libs.common.runtime.futures import pass_outcome
from libs.common.service_bounds import MAX_WAITING_WORK, RETRY_AFTER_S
from services.router.admission.fair_queue import FairQueue
from slipstream.errors import DeadlineExceeded, Overloaded

T = TypeVar("T")

# Pieces that run Python code take turns with the event loop: more threads would delay it, not speed them up.
N_THREADS = max(2, min(4, os.cpu_count() or 1))


class RunPiece(Protocol):
    """`FairThreads.run`, to those that need nothing else of it."""

    def __call__(self, tenant: str, piece: Callable[[], T], /) -> Awaitable[T]:
        """Run a piece of a tenant's work off the event loop."""
        ...


async def run_on_a_thread(tenant: str, piece: Callable[[], T]) -> T:
    """A `RunPiece` without queues."""
    return await asyncio.to_thread(piece)


class FairThreads:
    """Threads with one queue for each tenant. Call it from one event loop."""

    def __init__(self, *, n_threads: int = N_THREADS, max_waiting: int = MAX_WAITING_WORK) -> None:
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="request")
        self.size = self._free = n_threads
        self._max_waiting = max_waiting
        self._queue = FairQueue()
        self._waiting: dict[str, tuple[Callable[[], Any], asyncio.Future[Any]]] = {}
        self._names = itertools.count()

    @property
    def waiting(self) -> int:
        """The number of pieces that wait for a thread."""
        return len(self._queue)

    async def run(self, tenant: str, piece: Callable[[], T]) -> T:
        """Run one piece of the tenant's work on a thread; returns its result or raises its error.

        A piece whose caller is cancelled before it starts never runs.
        """
        name = str(next(self._names))
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.push(tenant, name, 1.0)
        self._waiting[name] = (piece, future)
        self._start()
        try:
            return await future
        finally:
            if self._queue.remove(name):
                del self._waiting[name]

    async def run_in_time(
        self, tenant: str, piece: Callable[[], T], deadline_s: float | None, *, admitted: bool = False
    ) -> T:
        """`run` with a deadline. Raises DeadlineExceeded, too.

        A piece of a request that is not `admitted` raises Overloaded where the tenant has its share of the
        queue already.
        """
        if not admitted:
            self._check_share(tenant)
        try:
            async with asyncio.timeout_at(deadline_s):
                return await self.run(tenant, piece)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed") from None

    def close(self) -> None:
        """Start no more pieces. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_share(self, tenant: str) -> None:
        if self._queue.waiting_of(tenant) >= self._max_waiting // self._queue.tenants_with(tenant):
            raise Overloaded(
                "too many long messages wait to be read", retry_after_ms=int(RETRY_AFTER_S[0] * 1e3)
            )

    def _start(self) -> None:
        while self._free and (name := self._queue.pop()) is not None:
            piece, future = self._waiting.pop(name)
            self._free -= 1
            running = asyncio.get_running_loop().run_in_executor(self._pool, piece)
            running.add_done_callback(partial(self._ended, future))

    def _ended(self, future: asyncio.Future[Any], running: asyncio.Future[Any]) -> None:
        self._free += 1
        pass_outcome(running, future)
        self._start()

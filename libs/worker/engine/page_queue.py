"""Who gets pages next: first come, first served, in a bounded queue.

A sequence that does not fit now waits for a release; one that came later never overtakes it, so a
long prompt is not starved by short ones. One command to the engine serves as many as fit.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from dataclasses import dataclass

from libs.engine.step.types import Engine, PageReservation, SequenceSpec
from libs.worker.engine.engine_thread import EngineThread
from slipstream.errors import OutOfPages, Overloaded, SlipstreamError


@dataclass(slots=True, eq=False)
class _Waiter:
    spec: SequenceSpec
    served: asyncio.Future[PageReservation]


class PageQueue:
    """Reserves pages on an engine thread. The only place that calls `reserve`."""

    def __init__(self, thread: EngineThread, *, max_waiting: int, max_running: int) -> None:
        self._thread = thread
        self._max_waiting = max_waiting
        self._max_running = max_running
        self._line: collections.deque[_Waiter] = collections.deque()
        self._running: set[str] = set()
        self._serving: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        thread.on_room = self._changed.set

    @property
    def waiting(self) -> int:
        """Sequences without pages yet."""
        return len(self._line)

    @property
    def running(self) -> int:
        """Sequences with pages."""
        return len(self._running)

    async def reserve(self, spec: SequenceSpec) -> PageReservation:
        """Pages for `spec`, when its turn comes. The caller releases with `release`, also after an error
        or cancel. Raises Overloaded when the queue is full, and what Engine.reserve raises."""
        if len(self._line) >= self._max_waiting:
            raise Overloaded(f"{len(self._line)} sequences wait for KV pages", retry_after_ms=1000)
        waiter = _Waiter(spec, asyncio.get_running_loop().create_future())
        self._line.append(waiter)
        self._changed.set()
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve(), name="page queue")
        try:
            return await waiter.served
        finally:
            if waiter in self._line:
                self._line.remove(waiter)
                self._changed.set()

    async def release(self, seq_id: str) -> None:
        """Give the sequence's pages back. Idempotent; ends when they are back: at once for one that has none,
        which need not wait for the step in progress."""
        if seq_id not in self._running:
            return
        released = self._thread.release(seq_id)
        try:
            await asyncio.shield(released)
        finally:
            self._running.discard(seq_id)
            self._changed.set()

    async def _serve(self) -> None:
        """Until nobody waits."""
        try:
            while self._line:
                self._changed.clear()
                places = max(self._max_running - len(self._running), 0)
                turn = list(self._line)[:places]
                if not turn or await self._serve_turn(turn):
                    await self._changed.wait()
        finally:
            self._serving = None

    async def _serve_turn(self, turn: list[_Waiter]) -> bool:
        """Serve from the front; True when the engine has no pages for the next one."""
        try:
            results = await self._thread.call(lambda engine: _reserve_in_order(engine, turn))
        except Exception as error:  # the engine has stopped
            results = [error] * len(turn)
        for waiter, result in zip(turn, results, strict=False):
            if waiter in self._line:
                self._line.remove(waiter)
            if isinstance(result, PageReservation):
                self._running.add(waiter.spec.seq_id)
            if waiter.served.done():  # cancelled, and its owner may have called `release` already
                with contextlib.suppress(SlipstreamError):  # the engine has stopped
                    await self.release(waiter.spec.seq_id)
            elif isinstance(result, PageReservation):
                waiter.served.set_result(result)
            elif result is not None:
                waiter.served.set_exception(result)
        return len(results) < len(turn)


def _reserve_in_order(engine: Engine, turn: list[_Waiter]) -> list[PageReservation | Exception | None]:
    """One result for each (None: cancelled meanwhile), up to the first that there are no pages for now."""
    results: list[PageReservation | Exception | None] = []
    for waiter in turn:
        if waiter.served.cancelled():
            results.append(None)
            continue
        try:
            results.append(engine.reserve(waiter.spec))
        except OutOfPages:
            break
        except Exception as error:
            results.append(error)
    return results

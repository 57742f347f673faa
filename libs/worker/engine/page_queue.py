"""A bounded FIFO queue of sequences that wait for KV pages.

A sequence that does not fit waits for a release. A later sequence never overtakes it, so short prompts do not
starve a long one. One engine command reserves pages for as many sequences as fit.
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
    """Reserves pages on an engine thread; nothing else calls `Engine.reserve`."""

    def __init__(self, thread: EngineThread, *, max_waiting: int, max_running: int) -> None:
        self._thread = thread
        self._max_waiting = max_waiting
        self._max_running = max_running
        self._queue: collections.deque[_Waiter] = collections.deque()
        self._running: set[str] = set()
        self._serving: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        thread.on_room = self._changed.set

    @property
    def waiting(self) -> int:
        """The number of sequences that wait for pages."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """The number of sequences with pages."""
        return len(self._running)

    async def reserve(self, spec: SequenceSpec) -> PageReservation:
        """Reserve pages for `spec` in queue order.

        The caller must call `release` afterwards, even after an error or a cancel. Raises Overloaded when the
        queue is full, and the errors of `Engine.reserve`.
        """
        if len(self._queue) >= self._max_waiting:
            raise Overloaded(f"{len(self._queue)} sequences wait for KV pages", retry_after_ms=1000)
        waiter = _Waiter(spec, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self._changed.set()
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve(), name="page queue")
        try:
            return await waiter.served
        finally:
            if waiter in self._queue:
                self._queue.remove(waiter)
                self._changed.set()

    async def release(self, seq_id: str) -> None:
        """Release the sequence's pages, if any, and wait until they are free. Idempotent."""
        if seq_id not in self._running:
            return
        released = self._thread.release(seq_id)
        try:
            await asyncio.shield(released)
        finally:
            self._running.discard(seq_id)
            self._changed.set()

    async def _serve(self) -> None:
        """Serve the queue until it is empty."""
        try:
            while self._queue:
                self._changed.clear()
                places = max(self._max_running - len(self._running), 0)
                front = list(self._queue)[:places]
                if not front or await self._serve_front(front):
                    await self._changed.wait()
        finally:
            self._serving = None

    async def _serve_front(self, front: list[_Waiter]) -> bool:
        """Serve the front of the queue. Returns whether the engine lacks pages for the next sequence."""
        try:
            results = await self._thread.call(lambda engine: _reserve_in_order(engine, front))
        except Exception as error:  # the engine has stopped
            results = [error] * len(front)
        for waiter, result in zip(front, results, strict=False):
            if waiter in self._queue:
                self._queue.remove(waiter)
            if isinstance(result, PageReservation):
                self._running.add(waiter.spec.seq_id)
            if waiter.served.done():  # cancelled, possibly after its owner called `release`
                with contextlib.suppress(SlipstreamError):  # the engine has stopped
                    await self.release(waiter.spec.seq_id)
            elif isinstance(result, PageReservation):
                waiter.served.set_result(result)
            elif result is not None:
                waiter.served.set_exception(result)
        return len(results) < len(front)


def _reserve_in_order(engine: Engine, front: list[_Waiter]) -> list[PageReservation | Exception | None]:
    """Reserve pages in order, up to the first sequence that does not fit. None stands for a cancelled one."""
    results: list[PageReservation | Exception | None] = []
    for waiter in front:
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

"""Who gets pages next: first come, first served, in a bounded queue.

A sequence that does not fit now waits for a release; one that came later never overtakes it, so a
long prompt is not starved by short ones.
"""

from __future__ import annotations

import asyncio
import collections

from libs.common.errors import OutOfPages, Overloaded
from libs.engine.types import Engine, Reservation, SequenceSpec
from libs.worker.engine_thread import EngineThread

# A page may come free without a release that we see (an unpin after a store, a cached block's
# last reference): look again after this long at the latest.
_RETRY_S = 0.25


class PageQueue:
    """Reserves pages on an engine thread. The only place that calls `reserve`."""

    def __init__(self, thread: EngineThread, *, max_waiting: int, max_running: int) -> None:
        self._thread = thread
        self._max_waiting = max_waiting
        self._max_running = max_running
        self._line: collections.deque[asyncio.Event] = collections.deque()
        self._running: set[str] = set()

    @property
    def waiting(self) -> int:
        """Sequences without pages yet."""
        return len(self._line)

    @property
    def running(self) -> int:
        """Sequences with pages."""
        return len(self._running)

    async def reserve(self, spec: SequenceSpec) -> Reservation:
        """Pages for `spec`, when its turn comes. The caller releases with `release`, also after an error
        or cancel. Raises Overloaded when the queue is full, and what Engine.reserve raises."""
        if len(self._line) >= self._max_waiting:
            raise Overloaded(f"{len(self._line)} sequences wait for KV pages", retry_after_ms=1000)
        turn = asyncio.Event()
        self._line.append(turn)
        try:
            while True:
                if self._line[0] is turn and len(self._running) < self._max_running:
                    reservation = await self._try(spec)
                    if reservation is not None:
                        return reservation
                turn.clear()
                try:
                    await asyncio.wait_for(turn.wait(), _RETRY_S)
                except TimeoutError:
                    pass
        finally:
            self._line.remove(turn)
            self._wake()

    async def release(self, seq_id: str) -> None:
        """Give the sequence's pages back. Idempotent; ends when they are back, also if cancelled."""

        def run(engine: Engine) -> None:
            engine.release(seq_id)

        released = self._thread.submit(run)
        try:
            await asyncio.shield(released)
        finally:
            self._running.discard(seq_id)
            self._wake()

    async def _try(self, spec: SequenceSpec) -> Reservation | None:
        self._running.add(spec.seq_id)
        try:
            return await self._thread.call(lambda engine: engine.reserve(spec))
        except OutOfPages:
            self._running.discard(spec.seq_id)
            return None
        except Exception:
            self._running.discard(spec.seq_id)
            raise

    def _wake(self) -> None:
        if self._line:
            self._line[0].set()

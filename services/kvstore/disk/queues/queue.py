"""Work queue for a disk's threads, which take waiting items in batches.

A batch is a run of neighbouring reads or a group of writes. The event loop adds items, threads take batches,
and one wake-up of the loop reports all results that arrived meanwhile. The queue records when the oldest
batch started, because a disk can hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from slipstream.errors import Unavailable

log = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
Ended = Exception | None
OnEnd = Callable[[int, Ended], None]
CallT_contra = TypeVar("CallT_contra", contravariant=True)


class DiskCalls(Protocol[CallT_contra]):
    """The reads or the writes of one disk. Event loop only."""

    def __len__(self) -> int:
        """Calls that wait or run."""
        ...

    @property
    def running_since_s(self) -> float | None:
        """When the oldest running call began; None when none runs."""

    def add(self, items: Sequence[CallT_contra], on_end: OnEnd) -> None:
        """Queue calls. `on_end` receives each result with its position."""

    def cancel_waiting(self, error: Exception) -> None:
        """End all calls that have not started."""

    def close(self, *, wait: bool) -> None:
        """Take no more calls; with `wait`, return when the threads have ended."""


class DiskWork(Protocol[ItemT]):
    """What the threads of a queue do with its items (`ReadWork`, `WriteWork`)."""

    def sort(self, added: list[ItemT]) -> None:
        """Order the items that one loop iteration added. Called on the event loop."""

    def pop_batch(self, waiting: deque[ItemT]) -> list[ItemT]:
        """Remove the next batch from a queue that is not empty. Called on a thread, under a lock."""

    def run(self, batch: Sequence[ItemT]) -> Sequence[Ended]:
        """Do the batch, and return the result of each item. Called on a thread."""


class DiskQueue(Generic[ItemT]):
    """A queue with its own `n_threads` threads."""

    def __init__(
        self, name: str, work: DiskWork[ItemT], *, n_threads: int, clock_s: Callable[[], float]
    ) -> None:
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix=name)
        self._n_threads = n_threads
        self._work = work
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._added: list[ItemT] = []
        self._waiting: deque[ItemT] = deque()
        self._tickets: dict[int, tuple[OnEnd, int]] = {}  # by the item's identity
        self._ended: list[tuple[Sequence[ItemT], Sequence[Ended]]] = []
        self._delivering = False
        self._running: dict[int, float] = {}
        self._n_drains = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        """Items that wait or run."""
        return len(self._tickets)

    @property
    def running_since_s(self) -> float | None:
        """Start of the oldest running batch; now if batches only wait; None when the queue is empty."""
        with self._lock:
            return min(self._running.values(), default=self._clock_s() if self._waiting else None)

    def add(self, items: Sequence[ItemT], on_end: OnEnd) -> None:
        """Queue items. `on_end` receives each result on the loop, with the item's position."""
        self._loop = asyncio.get_running_loop()
        if items and not self._added:
            self._loop.call_soon(self._start)
        for position, item in enumerate(items):
            self._tickets[id(item)] = on_end, position
        self._added.extend(items)

    def cancel_waiting(self, error: Exception) -> None:
        """End all items that no thread has taken."""
        self._start()
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        for item in waiting:
            self._end(item, error)

    def close(self, *, wait: bool) -> None:
        """Take no more work; with `wait`, return when the threads have ended."""
        self._threads.shutdown(wait=wait)

    def _start(self) -> None:
        added, self._added = self._added, []
        self._work.sort(added)
        with self._lock:
            self._waiting.extend(added)
            n_new = min(len(self._waiting), self._n_threads - self._n_drains)
            self._n_drains += n_new
        for n_begun in range(n_new):
            try:
                self._threads.submit(self._drain)
            except RuntimeError as error:  # closed, or no thread available
                self._drop_drains(n_new - n_begun, Unavailable(f"no thread for the disk: {error}"))
                return

    def _drop_drains(self, n_missing: int, error: Exception) -> None:
        """Correct the count of threads that could not start. If none runs, fail the waiting items."""
        with self._lock:
            self._n_drains -= n_missing
            left = [] if self._n_drains else list(self._waiting)
            if left:
                self._waiting.clear()
        for item in left:
            self._end(item, error)

    def _drain(self) -> None:
        me = threading.get_ident()
        while True:
            with self._lock:
                if not self._waiting:
                    self._n_drains -= 1
                    return
                batch = self._work.pop_batch(self._waiting)
                self._running[me] = self._clock_s()
            try:
                outcome = self._work.run(batch)
            except Exception as error:  # a defect: its items fail, the thread goes on
                log.exception("disk work failed")
                outcome = [error] * len(batch)
            with self._lock:
                del self._running[me]
                self._ended.append((batch, outcome))
                signal, self._delivering = not self._delivering, True
            if signal and self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended, and no caller waits
                    self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
            self._delivering = False
        for items, outcomes in ended:
            for item, outcome in zip(items, outcomes, strict=True):
                self._end(item, outcome)

    def _end(self, item: ItemT, outcome: Ended) -> None:
        on_end, position = self._tickets.pop(id(item))
        try:
            on_end(position, outcome)
        except Exception:  # a defect: the other items are still reported
            log.exception("a callback of disk work failed")

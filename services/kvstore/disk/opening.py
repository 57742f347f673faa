"""Opens disks at start in daemon threads, and waits for them while they make progress.

A hanging disk must not block the node. The node goes on without it and marks it as unavailable; its thread
goes on, and the tier uses the recovered index when the disk answers. The threads are daemons, so that a call
that never returns does not keep the process from exiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from services.kvstore.disk.segments.files import SegmentFiles
from services.kvstore.disk.segments.restore import OpenedDisk, open_disk
from services.kvstore.disk.table.table import DiskTable

log = logging.getLogger(__name__)

# An opening without a completed step in this time hangs. One step reads the headers of a segment.
HANGS_AFTER_S = 2.0
# Longest wait, even with progress: the node serves while a longer scan runs.
START_WAIT_S = 10.0
PUBLISH_BLOCKS = 2048
_TICK_S = 0.05

ResultT = TypeVar("ResultT")


def run_in_daemon_thread(name: str, work: Callable[[], ResultT]) -> asyncio.Future[ResultT]:
    """Run blocking work outside any thread pool; the result arrives on the running loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def report(result: ResultT | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended, and no caller waits
            loop.call_soon_threadsafe(report, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class ProgressTimeout:
    """Time-out of an opening, extended by its progress. Pure; times are in seconds."""

    def __init__(self, *, now_s: float, hangs_after_s: float = HANGS_AFTER_S) -> None:
        self._hangs_after_s = hangs_after_s
        self._give_up_at_s = now_s + START_WAIT_S
        self._quiet_s = 0.0
        self._seen_steps = 0
        self._at_s = now_s

    def should_wait(self, *, n_steps: int, now_s: float) -> bool:
        """Whether to go on waiting, given the completed steps. The caller polls every _TICK_S.

        A longer gap between two polls counts as two ticks only: this process lacked CPU time, not the disk.
        """
        passed_s, self._at_s = min(now_s - self._at_s, 2 * _TICK_S), now_s
        self._quiet_s = 0.0 if n_steps != self._seen_steps else self._quiet_s + passed_s
        self._seen_steps = n_steps
        return self._quiet_s < self._hangs_after_s and now_s < self._give_up_at_s


async def wait_with_progress(
    future: asyncio.Future[ResultT],
    *,
    steps: Callable[[], int] = lambda: 0,
    hangs_after_s: float = HANGS_AFTER_S,
    clock_s: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait until the future is done or makes no progress; returns whether it is done. Never cancels it."""
    patience = ProgressTimeout(now_s=clock_s(), hangs_after_s=hangs_after_s)
    while not future.done() and patience.should_wait(n_steps=steps(), now_s=clock_s()):
        await asyncio.wait({future}, timeout=_TICK_S)
    return future.done()


async def publish_all(table: DiskTable) -> None:
    """Report every block in the table through its `on_change`, while requests go on."""
    for number, key in enumerate(table.keys()):
        if table.contains(key):
            table.on_change(key, True)
        if number % PUBLISH_BLOCKS == PUBLISH_BLOCKS - 1:
            await asyncio.sleep(0)


class DiskOpener:
    """Locks and scans one disk's directory. Event loop only, except `load` and `close`."""

    def __init__(
        self, files: SegmentFiles, new_table: Callable[[], DiskTable], *, clock_s: Callable[[], float]
    ) -> None:
        self._files = files
        self._new_table = new_table
        self._clock_s = clock_s
        self._n_steps = 0
        self._lock_fd = -1
        self.opened = False
        self.runs = False  # whether the thread runs

    def load(self, table: DiskTable) -> OpenedDisk:
        """Lock the directory and fill the empty table. Raises OSError, FailedPrecondition. Blocking."""
        found = open_disk(table, self._files, clock_s=self._clock_s, on_step=self._stepped)
        self._lock_fd, self.opened = found.lock_fd, True
        return found

    async def load_in_thread(self, found: Callable[[OpenedDisk], None]) -> DiskTable:
        """Open the disk in a thread; returns its table, and passes the rest to `found`. Raises as `load`."""
        table = self._new_table()

        def load() -> OpenedDisk:
            try:
                return self.load(table)
            finally:
                self.runs = False  # even if no caller waits any more

        self.runs = True
        try:
            loading = run_in_daemon_thread("kv-open", load)
        except RuntimeError:  # no thread available
            self.runs = False
            raise
        found(await loading)
        return table

    async def wait_with_progress(self, opening: asyncio.Future[None]) -> bool:
        """Wait for a running opening; returns whether it ended, rather than hangs."""
        return await wait_with_progress(opening, steps=lambda: self._n_steps, clock_s=self._clock_s)

    def close(self) -> None:
        """Unlock the directory. Idempotent."""
        if self._lock_fd >= 0:
            self._files.io.close(self._lock_fd)
            self._lock_fd = -1

    def _stepped(self) -> None:
        self._n_steps += 1

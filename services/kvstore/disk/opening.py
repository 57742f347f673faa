"""Disks at the start: opened in threads of their own, and waited for as long as they make progress.

A disk that hangs would hold up the whole node, so who waits goes on without it: it is away, its thread goes
on, and what it finds is taken in when the disk answers. The threads are daemons: a call that never returns
keeps no process from ending.
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

# No step of an opening ended in that time (the superblock and headers of a segment are one): it hangs.
HANGS_AFTER_S = 2.0
# However well it goes: a node that scans for longer serves meanwhile.
START_WAIT_S = 10.0
TELL_BLOCKS = 2048
_TICK_S = 0.05

ResultT = TypeVar("ResultT")


def in_daemon_thread(name: str, work: Callable[[], ResultT]) -> asyncio.Future[ResultT]:
    """Run blocking work outside of any pool; its end is told on the running loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def tell(result: ResultT | None, error: BaseException | None) -> None:
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
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Patience:
    """How long to wait for an opening. Pure; time is given, in seconds."""

    def __init__(
        self, *, now_s: float, hangs_after_s: float = HANGS_AFTER_S, at_most_s: float = START_WAIT_S
    ) -> None:
        self._hangs_after_s = hangs_after_s
        self._give_up_at_s = now_s + at_most_s
        self._quiet_s = 0.0
        self._seen_steps = 0
        self._at_s = now_s

    def goes_on(self, *, n_steps: int, now_s: float) -> bool:
        """Whether to wait on, now that `n_steps` have ended. To be asked every moment: a pause between two
        looks counts for one moment only, as then this process got no time, and the disk may be well."""
        passed_s, self._at_s = min(now_s - self._at_s, 2 * _TICK_S), now_s
        self._quiet_s = 0.0 if n_steps != self._seen_steps else self._quiet_s + passed_s
        self._seen_steps = n_steps
        return self._quiet_s < self._hangs_after_s and now_s < self._give_up_at_s


async def wait_patiently(
    future: asyncio.Future[ResultT],
    *,
    steps: Callable[[], int] = lambda: 0,
    hangs_after_s: float = HANGS_AFTER_S,
    clock_s: Callable[[], float] = time.monotonic,
) -> bool:
    """Until the future is done, or hangs; whether it is done. It is never cancelled."""
    patience = Patience(now_s=clock_s(), hangs_after_s=hangs_after_s)
    while not future.done() and patience.goes_on(n_steps=steps(), now_s=clock_s()):
        await asyncio.wait({future}, timeout=_TICK_S)
    return future.done()


async def tell_of_all(table: DiskTable) -> None:
    """Tell of every block in the table, while requests go on."""
    for number, key in enumerate(table.keys()):
        if table.contains(key):
            table.on_change(key, True)
        if number % TELL_BLOCKS == TELL_BLOCKS - 1:
            await asyncio.sleep(0)


class DiskOpener:
    """Takes one disk's directory and finds what is in it. Event loop only, but for `load` and `close`."""

    def __init__(
        self, files: SegmentFiles, new_table: Callable[[], DiskTable], *, clock_s: Callable[[], float]
    ) -> None:
        self._files = files
        self._new_table = new_table
        self._clock_s = clock_s
        self._n_steps = 0
        self._lock_fd = -1
        self.opened = False
        self.runs = False  # in a thread of its own

    def load(self, table: DiskTable) -> OpenedDisk:
        """Take the directory and fill the empty table. Raises OSError, FailedPrecondition. Blocking."""
        found = open_disk(table, self._files, clock_s=self._clock_s, stepped=self._stepped)
        self._lock_fd, self.opened = found.lock_fd, True
        return found

    async def load_in_thread(self, found: Callable[[OpenedDisk], None]) -> DiskTable:
        """A table with what is there; `found` hears of the rest before. Raises as `load`."""
        table = self._new_table()

        def load() -> OpenedDisk:
            try:
                return self.load(table)
            finally:
                self.runs = False  # not before, even if nobody waits any more

        self.runs = True
        try:
            loading = in_daemon_thread("kv-open", load)
        except RuntimeError:  # no thread is to be had
            self.runs = False
            raise
        found(await loading)
        return table

    async def wait_patiently(self, opening: asyncio.Future[None]) -> bool:
        """Whether an opening that was begun has ended, or hangs."""
        return await wait_patiently(opening, steps=lambda: self._n_steps, clock_s=self._clock_s)

    def close(self) -> None:
        """Let go of the directory. Idempotent."""
        if self._lock_fd >= 0:
            self._files.io.close(self._lock_fd)
            self._lock_fd = -1

    def _stepped(self) -> None:
        self._n_steps += 1

"""Writes of one disk in groups that become durable together: the writer interface and its threaded form."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.kvstore.disk.queues.queue import DiskCalls, DiskQueue, Ended
from services.kvstore.disk.segments.files import BlockWrite, SegmentFiles

WRITE_THREADS = 4
GROUPS_AT_ONCE = 2
MAX_GROUP_BYTES = 16 << 20
MAX_GROUP_BLOCKS = 32  # a third of a disk's bound: one group is written, one synced, one waits

# Makes blocks durable. Writes that wait together form a group; the results are None, OSError or SyncFailed.
DiskWriter = DiskCalls[BlockWrite]


class ThreadedWriter:
    """A writer with interpreter threads, through the files' `DiskIo`."""

    def __init__(self, files: SegmentFiles, clock_s: Callable[[], float]) -> None:
        self._payload_threads = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="kv-payload")
        work = WriteWork(files, self._payload_threads)
        self._queue = DiskQueue("kv-write", work, n_threads=GROUPS_AT_ONCE, clock_s=clock_s)
        self.add = self._queue.add
        self.cancel_waiting = self._queue.cancel_waiting

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def running_since_s(self) -> float | None:
        return self._queue.running_since_s

    def close(self, *, wait: bool) -> None:
        self._queue.close(wait=wait)
        self._payload_threads.shutdown(wait=wait)


class WriteWork:
    """Writes groups through the files' `DiskIo`, in the order of their arrival."""

    def __init__(self, files: SegmentFiles, payload_threads: ThreadPoolExecutor) -> None:
        self._files = files
        self._payload_threads = payload_threads

    def sort(self, added: list[BlockWrite]) -> None:
        """Keep the order of their arrival."""

    def pop_batch(self, waiting: deque[BlockWrite]) -> list[BlockWrite]:
        return pop_group(waiting)

    def run(self, batch: Sequence[BlockWrite]) -> Sequence[Ended]:
        return self._files.write_group(batch, self._payload_threads)


def pop_group(waiting: deque[BlockWrite]) -> list[BlockWrite]:
    """Remove the next group from the queue."""
    group: list[BlockWrite] = []
    n_bytes = 0
    while waiting and len(group) < MAX_GROUP_BLOCKS:
        if group and n_bytes + waiting[0].slot.slot_bytes > MAX_GROUP_BYTES:
            break
        group.append(waiting.popleft())
        n_bytes += group[-1].slot.slot_bytes
    return group

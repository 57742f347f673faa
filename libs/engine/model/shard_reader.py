"""Reads bytes of shards in several threads: in the page cache, or past it with direct I/O.

The page cache would hold a second copy of the weights. So bytes that are not in it stay out of it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from libs.engine.kernels.panel_memory import map_huge_pages
from libs.engine.model.shard_file import ALIGNED, Bytes, ShardFile

N_THREADS = 8  # pieces in flight: a drive needs several
_HUGE_BYTES = 2 << 20


class ShardReader:
    """The shards of one directory and the threads that read them. Jobs start in the order of `submit`."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._files: dict[str, ShardFile] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()  # its `staging` memory, and what it has `mapped`
        self._pool = ThreadPoolExecutor(N_THREADS, thread_name_prefix="load")
        self._jobs: list[Future[None]] = []
        self._stopped = threading.Event()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.append(self._pool.submit(self._run, job))

    def finish(self) -> None:
        """Wait for all jobs. Raises what the first failed one, by the order of `submit`, raised."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def close(self) -> None:
        """End the threads after their present jobs, and close the files."""
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            file.close()
        self._files.clear()

    def map_cached(self, shard: str, offset: int, n_bytes: int) -> Bytes | None:
        """Bytes of a shard that are in the page cache, valid until this thread maps others; else None.

        Raises OSError.
        """
        file = self._open(shard)
        self._unmap()
        found = file.map_cached(offset, n_bytes)
        if found is not None:
            self._thread.mapped = file, offset, n_bytes
        return found

    def read(self, shard: str, offset: int, n_bytes: int, *, others_read: bool = False) -> Bytes:
        """Bytes of a shard, valid until this thread reads again. Raises OSError.

        `others_read`: other processes need them, too, so that they go into the page cache.
        """
        file = self._open(shard)
        before = offset % ALIGNED
        end = -(-(offset + n_bytes) // ALIGNED) * ALIGNED
        target = self._staging(end - offset + before)
        is_buffered = others_read or file.direct == file.buffered
        descriptor, unit = (file.buffered, 1) if is_buffered else (file.direct, ALIGNED)
        _read_fully(descriptor, target, offset - before, before + n_bytes, unit)
        return np.frombuffer(target, np.uint8, n_bytes, before)

    def copy(self, shard: str, offset: int, n_bytes: int) -> bytearray:
        """A copy of a few bytes of a shard, through the page cache. Raises OSError."""
        found = bytearray(n_bytes)
        _read_fully(self._open(shard).buffered, memoryview(found), offset, n_bytes)
        return found

    def _run(self, job: Callable[[], None]) -> None:
        if self._stopped.is_set():  # an earlier job failed, and `finish` raises its error
            return
        try:
            job()
        except BaseException:
            self._stopped.set()
            raise

    def _open(self, shard: str) -> ShardFile:
        with self._lock:
            if shard not in self._files:
                self._files[shard] = ShardFile(self._model_dir / shard)
            return self._files[shard]

    def _unmap(self) -> None:
        mapped: tuple[ShardFile, int, int] | None = getattr(self._thread, "mapped", None)
        if mapped is not None:
            self._thread.mapped = None
            file, offset, n_bytes = mapped
            file.unmap(offset, n_bytes)

    def _staging(self, n_bytes: int) -> memoryview:
        """Memory of this thread. Huge pages: a drive reads twice as fast into them as into scattered ones."""
        staging: mmap.mmap | None = getattr(self._thread, "staging", None)
        if staging is None or len(staging) < n_bytes:
            size = -(-n_bytes // _HUGE_BYTES) * _HUGE_BYTES
            staging = self._thread.staging = map_huge_pages(size)
        return memoryview(staging)[:n_bytes]


def _read_fully(descriptor: int, target: memoryview, offset: int, wanted: int, unit: int = 1) -> None:
    """`unit`: a read goes on at its multiples only. A direct one ends within a block where the file ends."""
    done = 0
    while done < wanted:
        n_bytes = os.preadv(descriptor, [target[done:]], offset + done)
        if done + n_bytes >= wanted:
            return
        before, done = done, (done + n_bytes) // unit * unit
        if done == before:
            raise OSError("the file ends too early")

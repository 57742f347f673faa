"""Reads bytes of shards in several threads: from the page cache, or past it with direct I/O.

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
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

N_THREADS = 8  # pieces in flight: a drive needs several
_ALIGNED = 4096  # what direct I/O asks of offsets, sizes and memory
_NO_WAIT: int = getattr(os, "RWF_NOWAIT", 0)


class ShardReader:
    """The shards of one directory and the threads that read them. Jobs start in the order of `submit`."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._files: dict[str, tuple[int, int | None]] = {}  # descriptors: buffered, direct
        self._lock = threading.Lock()
        self._staging = threading.local()
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
        for descriptors in self._files.values():
            for descriptor in descriptors:
                if descriptor is not None:
                    os.close(descriptor)
        self._files.clear()

    def read(self, shard: str, offset: int, n_bytes: int) -> Bytes:
        """Bytes of a shard, valid until this thread reads again. Raises OSError."""
        buffered, direct = self._open(shard)
        before = offset % _ALIGNED
        end = -(-(offset + n_bytes) // _ALIGNED) * _ALIGNED
        staging = self._buffer(end - offset + before)
        target = memoryview(staging)[: end - offset + before]
        wanted = before + n_bytes
        if _read_cached(buffered, target, offset - before) < wanted:
            _read_fully(buffered if direct is None else direct, target, offset - before, wanted)
        return np.frombuffer(staging, np.uint8, n_bytes, before)

    def _run(self, job: Callable[[], None]) -> None:
        if self._stopped.is_set():  # an earlier job failed, and `finish` raises its error
            return
        try:
            job()
        except BaseException:
            self._stopped.set()
            raise

    def _open(self, shard: str) -> tuple[int, int | None]:
        with self._lock:
            if shard not in self._files:
                path = self._model_dir / shard
                buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
                except OSError:  # the file system has no direct I/O
                    direct = None
                self._files[shard] = buffered, direct
            return self._files[shard]

    def _buffer(self, n_bytes: int) -> mmap.mmap:
        """Memory of this thread; mappings begin at a page."""
        staging: mmap.mmap | None = getattr(self._staging, "memory", None)
        if staging is None or len(staging) < n_bytes:
            staging = self._staging.memory = mmap.mmap(-1, n_bytes)
        return staging


def _read_cached(descriptor: int, target: memoryview, offset: int) -> int:
    """Read what the page cache has without a gap; returns the bytes."""
    if not _NO_WAIT:
        return 0
    try:
        return os.preadv(descriptor, [target], offset, _NO_WAIT)
    except OSError:  # nothing is cached, or the file system lacks RWF_NOWAIT
        return 0


def _read_fully(descriptor: int, target: memoryview, offset: int, wanted: int) -> None:
    done = 0
    while done < wanted:
        n_bytes = os.preadv(descriptor, [target[done:]], offset + done)
        if done + n_bytes >= wanted:
            return
        # A direct read must go on at the begin of a block; only the end of the file is within one.
        if n_bytes < _ALIGNED:
            raise OSError("the file ends too early")
        done = (done + n_bytes) // _ALIGNED * _ALIGNED

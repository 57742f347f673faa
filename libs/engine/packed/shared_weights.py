"""Opens a checkpoint's packed weights: mapped where there are some, else packed once for all processes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from libs.engine.kernels.panels import PanelPacker, TensorMemory
from libs.engine.packed.packed_file import PackedFileUnusable, open_packed_file
from libs.engine.packed.weight_store import MappedWeights, NewPackedFile, PrivateWeights, WeightStore
from libs.engine.step.load_progress import LoadProgress

log = logging.getLogger(__name__)

_POLL_S = 0.02
# How long another process may pack before this one packs for itself: at least, and at a slow drive's speed.
_LEAST_WAIT_S, _SLOW_BYTES_S = 20.0, 100e6
# The process that packs touches the lock so often; others no longer wait for one that is silent for so long.
_HEARTBEAT_S, _ABANDONED_S = 1.0, 10.0
_FREE_SHARE = 0.5  # of a disk's free space: how much of it a new file may take


@dataclass(frozen=True, slots=True)
class PackedSource:
    """A loader's knowledge before it reads values. `expected_bytes`: about the weights' size in memory."""

    path: Path
    key: Callable[[], str]
    expected_bytes: int
    make_packer: Callable[[TensorMemory], PanelPacker]


@contextlib.contextmanager
def open_shared_weights(source: PackedSource, progress: LoadProgress) -> Iterator[WeightStore]:
    """A store for one load. One process packs at a time, and others wait for its file.

    A directory that cannot be written, a full disk and a process that packs for too long or is stopped leave
    the weights in the memory of this process. Sharing never fails a load.
    """
    with contextlib.ExitStack() as stack:
        store = _open(source, progress, stack)
        yield store
        try:
            store.finish()
        except OSError as error:
            _say_private(source, error)


def _open(source: PackedSource, progress: LoadProgress, stack: contextlib.ExitStack) -> WeightStore:
    deadline_s = time.monotonic() + _LEAST_WAIT_S + source.expected_bytes / _SLOW_BYTES_S
    refused: tuple[int, int] | None = None  # the file that was found unusable
    lock_path = source.path.with_name(f"{source.path.name}.lock")
    heartbeat: tuple[int, int] | None = None
    heartbeat_s = time.monotonic()
    try:
        source.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            # Locked first: a file that another process finishes meanwhile is then seen.
            lock = _lock(lock_path, stack)
            found = _identity(source.path)
            if found is not None and found != refused:
                mapped = _map(source, progress)
                if mapped is not None:
                    stack.close()  # the lock
                    return mapped
                refused = found
            if lock is not None:
                stack.enter_context(_heartbeats(lock))
                return _new_file(source, stack)
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise TimeoutError("another process packs it for too long")
            last, heartbeat = heartbeat, _identity(lock_path)
            if heartbeat != last:
                heartbeat_s = now_s
            elif now_s - heartbeat_s > _ABANDONED_S:
                raise TimeoutError("the process that packs it shows no sign of life")
            time.sleep(_POLL_S)
    except OSError as error:
        stack.close()
        _say_private(source, error)
        return PrivateWeights()


def _map(source: PackedSource, progress: LoadProgress) -> MappedWeights | None:
    before, done_bytes = progress.total_bytes, progress.done_bytes
    lock = threading.Lock()
    progress.total_bytes = source.path.stat().st_size

    def count(n_bytes: int) -> None:
        with lock:
            progress.done_bytes += n_bytes

    try:
        found = MappedWeights(open_packed_file(source.path, source.key, count))
        progress.total_bytes = progress.done_bytes
        return found
    except FileNotFoundError:
        pass
    except PackedFileUnusable as error:
        log.warning("the packed weights %s are packed again: the file %s", source.path, error)
    progress.total_bytes, progress.done_bytes = before, done_bytes
    return None


def _new_file(source: PackedSource, stack: contextlib.ExitStack) -> NewPackedFile:
    disk = os.statvfs(source.path.parent)
    free_bytes = disk.f_bavail * disk.f_frsize
    if source.expected_bytes > free_bytes * _FREE_SHARE:
        raise OSError(f"it needs {source.expected_bytes / 1e6:,.1f} MB of {free_bytes / 1e6:,.1f} MB free")
    file = NewPackedFile(source.path, source.key(), source.make_packer, source.expected_bytes)
    stack.callback(file.close)
    return file


@contextlib.contextmanager
def _heartbeats(lock: int) -> Iterator[None]:
    """Touch the locked file meanwhile. The thread of a process that is stopped does not."""
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(_HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(lock)

    thread = threading.Thread(target=touch, name="packer-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _lock(path: Path, stack: contextlib.ExitStack) -> int | None:
    """Take the lock until the stack is closed, and return its file; None if another process has it.

    Another user who can open the file could hold it for ever. A named pipe in its place does not wait.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    stack.callback(os.close, descriptor)
    return descriptor


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _say_private(source: PackedSource, error: OSError) -> None:
    log.warning("weights are not shared: %s: %s", source.path, error.strerror or error)

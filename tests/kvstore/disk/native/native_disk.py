"""The native writer over a disk in memory, which replaces `pwritev` and `fdatasync`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from libs.common.checksum import memory_at
from services.kvstore.disk.native.library import native_library
from services.kvstore.disk.native.writes import NativeWriter, WriteCalls
from services.kvstore.disk.segments.files import SegmentFiles
from services.kvstore.disk.tier import DiskTier
from tests.kvstore.disk.memory_disk import MemoryDisk


class _View(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("n_bytes", ctypes.c_size_t))


_WRITE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.POINTER(_View), ctypes.c_int, ctypes.c_int64)
_SYNC = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int)


def native_writer(files: SegmentFiles, disk: MemoryDisk) -> NativeWriter:
    """Return a native writer of these files whose calls go to the disk in memory."""

    def write(fd: int, views: Any, n_views: int, offset: int) -> int:
        buffers = [memory_at(views[n].address, views[n].n_bytes) for n in range(n_views)]
        return _result(lambda: disk.pwritev(fd, buffers, offset))

    def sync(fd: int) -> int:
        def synced() -> int:
            disk.fdatasync(fd)
            return 0

        return _result(synced)

    library = native_library()
    assert library is not None
    return NativeWriter(files, library, time.monotonic, WriteCalls(_WRITE(write), _SYNC(sync)))


def write_natively(tier: DiskTier, disk: MemoryDisk) -> None:
    """Make an unused tier write to the disk through the native library."""
    tier._writes.close(wait=True)
    tier._writes = native_writer(tier.files, disk)


def _result(call: Callable[[], int]) -> int:
    try:
        return call()
    except OSError as error:
        return -(error.errno or 5)

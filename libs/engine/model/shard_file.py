"""One file of a checkpoint: its mapping for bytes in the page cache, and descriptors for others."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

ALIGNED = 4096  # what direct I/O asks of offsets, sizes and memory
# madvise of <linux/mman.h>; Python lacks the second.
_DONTNEED, _POPULATE_READ = 4, 22

_PROBED_BYTES = 1 << 20
_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)  # what a file system without it says

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def read_no_further(descriptor: int) -> None:
    """Let reads put into the page cache what they ask for, and no megabytes behind it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


class ShardFile:
    """Open until `close`. Any thread may read. Raises OSError when it cannot be opened.

    A file that is truncated while its bytes are mapped ends the process (SIGBUS).
    """

    def __init__(self, path: Path) -> None:
        self.buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        read_no_further(self.buffered)
        self._memory: mmap.mmap | None = None
        self._address = 0
        try:
            self.direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno not in _NO_DIRECT_IO:
                os.close(self.buffered)
                raise
            self.direct = self.buffered
        if sys.platform == "linux" and self._shows_cached_pages(path):
            self._map()

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        for descriptor in {self.buffered, self.direct}:
            os.close(descriptor)

    def map_cached(self, offset: int, n_bytes: int) -> Bytes | None:
        """Bytes in the page cache, without a copy; None for others. `unmap` ends their use.

        A page of each megabyte stands for all: a question about each page takes 4 % of a load.
        """
        begin, end = self._pages(offset, n_bytes)
        if self._memory is None:
            return None
        # The file may have become shorter or longer since it was mapped.
        if offset + n_bytes > min(len(self._memory), os.fstat(self.buffered).st_size):
            return None
        if not all(self._is_cached(at) for at in (*range(begin, end, _PROBED_BYTES), end - 1)):
            return None
        if _libc.madvise(self._address + begin, end - begin, _POPULATE_READ):
            return None  # an older kernel, or the file has become shorter
        return np.frombuffer(
            memoryview((ctypes.c_uint8 * n_bytes).from_address(self._address + offset)), np.uint8
        )

    def unmap(self, offset: int, n_bytes: int) -> None:
        """Let the bytes count as memory of this process no longer."""
        begin, end = self._pages(offset, n_bytes)
        _libc.madvise(self._address + begin, end - begin, _DONTNEED)

    def _map(self) -> None:
        try:
            self._memory = mmap.mmap(self.buffered, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        except (OSError, ValueError):  # a file system without mappings, or an empty file
            pass

    def _shows_cached_pages(self, path: Path) -> bool:
        """Whether mincore answers this process. Of files of others, it calls every page cached."""
        return os.fstat(self.buffered).st_uid == os.geteuid() or os.access(path, os.W_OK)

    def _is_cached(self, at: int) -> bool:
        found = ctypes.create_string_buffer(1)
        page = self._address + at - at % mmap.PAGESIZE
        return not _libc.mincore(page, mmap.PAGESIZE, found) and bool(found.raw[0] & 1)

    def _pages(self, offset: int, n_bytes: int) -> tuple[int, int]:
        return offset - offset % mmap.PAGESIZE, -(-(offset + n_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE

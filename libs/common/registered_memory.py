"""Page-aligned memory for KV: what the transport registers and direct I/O accepts."""

from __future__ import annotations

import ctypes
import mmap

from libs.common.checksum import memory_at

PAGE_BYTES = mmap.PAGESIZE


def page_rounded(n_bytes: int) -> int:
    """The smallest multiple of the page size that holds `n_bytes`."""
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


class PageAlignedMemory:
    """One anonymous mapping, zeroed; the kernel commits its pages when they are first touched.

    It lives as long as this object or anything that was made from `buffer`.
    """

    def __init__(self, n_bytes: int) -> None:
        if n_bytes <= 0:
            raise ValueError("n_bytes must be positive")
        self.n_bytes = page_rounded(n_bytes)
        self.buffer = mmap.mmap(-1, self.n_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def view(self, offset: int, n_bytes: int) -> memoryview:
        """The bytes [offset, offset + n_bytes). IndexError outside the mapping."""
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.n_bytes:
            raise IndexError(f"[{offset}, {offset + n_bytes}) of {self.n_bytes} bytes")
        return memory_at(self.address + offset, n_bytes) if n_bytes else memoryview(b"")

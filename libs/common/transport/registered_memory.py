"""Page-aligned memory for KV: what the transport registers and direct I/O accepts."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from libs.common.checksum import memory_at

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20


def page_rounded(n_bytes: int) -> int:
    """The smallest multiple of the page size that holds `n_bytes`."""
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


class PageAlignedMemory:
    """Anonymous memory, zeroed; the kernel commits its pages when they are first touched.

    What is large enough lies on huge pages where the kernel has them: a direct read of a block is then a few
    pieces of memory instead of a thousand, for the disk and for the processor. Private, because shared
    memory has no huge pages unless the machine was set up for it; a forked child does not have it, so that
    no write after a fork moves pages away from a device that fills them.

    It lives as long as this object or anything that was made from `buffer`.
    """

    def __init__(self, n_bytes: int) -> None:
        if n_bytes <= 0:
            raise ValueError("n_bytes must be positive")
        self.n_bytes = page_rounded(n_bytes)
        spare_bytes = HUGE_PAGE_BYTES if self.n_bytes >= HUGE_PAGE_BYTES else 0  # to begin with a huge page
        mapping = mmap.mmap(-1, self.n_bytes + spare_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start_bytes = 0
        if spare_bytes:
            start_bytes = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE_BYTES
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
        mapping.madvise(mmap.MADV_DONTFORK)
        self.buffer = memoryview(mapping)[start_bytes : start_bytes + self.n_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def view(self, offset: int, n_bytes: int) -> memoryview:
        """The bytes [offset, offset + n_bytes). IndexError outside the mapping."""
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.n_bytes:
            raise IndexError(f"[{offset}, {offset + n_bytes}) of {self.n_bytes} bytes")
        return memory_at(self.address + offset, n_bytes) if n_bytes else memoryview(b"")

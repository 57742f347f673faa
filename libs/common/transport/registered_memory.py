"""Page-aligned memory for KV, which the transport can register and direct I/O accepts."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from libs.common.checksum import memory_at
from slipstream.errors import InvalidArgument

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20


def page_rounded(n_bytes: int) -> int:
    """The smallest multiple of the page size that holds `n_bytes`."""
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


class PageAlignedMemory:
    """Zeroed anonymous memory. The kernel commits each page at its first access.

    Large memory uses huge pages if the kernel has them. A direct read of a block then fills a few pieces of
    memory instead of a thousand. The mapping is private, because shared memory has huge pages only on
    machines set up for it. A forked child does not get the mapping: otherwise a write after a fork would copy
    pages away from a device that fills them.

    The memory lives as long as this object or any object made from `buffer`.
    """

    def __init__(self, n_bytes: int, *, field: str = "") -> None:
        """`field`: the setting of the size. Raises InvalidArgument with it, or MemoryError without one, where
        the kernel gives no such memory."""
        if n_bytes <= 0:
            raise ValueError("n_bytes must be positive")
        self.n_bytes = page_rounded(n_bytes)
        spare_bytes = HUGE_PAGE_BYTES if self.n_bytes >= HUGE_PAGE_BYTES else 0  # to align the start
        try:
            mapping = mmap.mmap(-1, self.n_bytes + spare_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            reason = f"{self.n_bytes} bytes cannot be allocated: {error}"
            raise InvalidArgument(field, reason) if field else MemoryError(reason) from None
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

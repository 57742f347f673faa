"""KV pages in memory that all ranks of a group map: one copy of each latent, in the layout of one process.

A pipeline stage writes the range of layers that it holds within each page, a rank of a KV split its slots.
The other ranks of a stage compute the same latents, bit for bit, and write the same bytes. So a page is
complete when a step ends. Rank 0 exports and fills pages as one process does, whatever the cut.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from libs.common.transport.registered_memory import PageAlignedMemory, page_rounded


class SharedPageMemory(PageAlignedMemory):
    """Memory behind a file descriptor without a name. The descriptor lives as long as this object."""

    def __init__(self, n_bytes: int, descriptor: int | None = None) -> None:
        """Zeroed memory, or for `descriptor` that of another process; takes the descriptor over."""
        self.n_bytes = page_rounded(n_bytes)
        if descriptor is None:
            descriptor = os.memfd_create("slipstream-kv")
            os.ftruncate(descriptor, self.n_bytes)
        self.descriptor = descriptor
        mapping = mmap.mmap(descriptor, self.n_bytes, flags=mmap.MAP_SHARED)
        mapping.madvise(mmap.MADV_DONTFORK)
        self.buffer = memoryview(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

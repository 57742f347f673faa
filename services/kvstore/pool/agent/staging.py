"""Memory that a node shares with its pool agent, through which values pass. `Extents` is pure."""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import insort
from dataclasses import dataclass

from libs.common.checksum import memory_at
from libs.common.transport.registered_memory import page_rounded


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """The bytes [offset, offset + n_bytes), page-aligned and page-rounded."""

    offset: int
    n_bytes: int


class Extents:
    """First-fit allocator over one range; adjacent free extents merge."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._free = [Extent(0, n_bytes)]
        self._allocated: set[Extent] = set()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all allocated extents."""
        return sum(extent.n_bytes for extent in self._allocated)

    def allocate(self, n_bytes: int) -> Extent | None:
        """An extent of at least `n_bytes`; None when there is none now."""
        wanted = page_rounded(n_bytes)
        for position, hole in enumerate(self._free):
            if hole.n_bytes >= wanted:
                rest = Extent(hole.offset + wanted, hole.n_bytes - wanted)
                self._free[position : position + 1] = [rest] if rest.n_bytes else []
                extent = Extent(hole.offset, wanted)
                self._allocated.add(extent)
                return extent
        return None

    def free(self, extent: Extent) -> None:
        """Free the extent. Raises ValueError if it is not allocated."""
        if extent not in self._allocated:
            raise ValueError(f"{extent} is not allocated")
        self._allocated.remove(extent)
        insort(self._free, extent)
        merged: list[Extent] = []
        for hole in self._free:
            if merged and merged[-1].offset + merged[-1].n_bytes == hole.offset:
                merged[-1] = Extent(merged[-1].offset, merged[-1].n_bytes + hole.n_bytes)
            else:
                merged.append(hole)
        self._free = merged


class SharedMemory:
    """An anonymous file (memfd), mapped here and, by its descriptor, in a child. Freed with its last user."""

    def __init__(self, n_bytes: int, *, fd: int | None = None) -> None:
        """Create one; with `fd`, map the one that another process created."""
        self.fd = os.memfd_create("slipstream-pool") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, n_bytes)
        self.n_bytes = n_bytes
        self.buffer = mmap.mmap(self.fd, n_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def view(self, offset: int, n_bytes: int) -> memoryview:
        """The bytes [offset, offset + n_bytes). Raises IndexError outside the range."""
        if offset < 0 or n_bytes < 1 or offset + n_bytes > self.n_bytes:
            raise IndexError(f"[{offset}, {offset + n_bytes}) of {self.n_bytes} bytes")
        return memory_at(self.address + offset, n_bytes)

    def close(self) -> None:
        """Close the descriptor; the mapping ends with its last reference. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

"""Memory that a node and its pool agent share: values pass through it. `Extents` is pure."""

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
    """First fit over one range; neighbours that are free become one."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._free = [Extent(0, n_bytes)]
        self._taken: set[Extent] = set()

    @property
    def taken_bytes(self) -> int:
        """Bytes of all extents that were not given back."""
        return sum(extent.n_bytes for extent in self._taken)

    def take(self, n_bytes: int) -> Extent | None:
        """An extent of at least `n_bytes`, None when there is none now."""
        wanted = page_rounded(n_bytes)
        for position, hole in enumerate(self._free):
            if hole.n_bytes >= wanted:
                rest = Extent(hole.offset + wanted, hole.n_bytes - wanted)
                self._free[position : position + 1] = [rest] if rest.n_bytes else []
                taken = Extent(hole.offset, wanted)
                self._taken.add(taken)
                return taken
        return None

    def give_back(self, extent: Extent) -> None:
        """The extent is free again. ValueError when it was not taken."""
        if extent not in self._taken:
            raise ValueError(f"{extent} is not taken")
        self._taken.remove(extent)
        insort(self._free, extent)
        merged: list[Extent] = []
        for hole in self._free:
            if merged and merged[-1].offset + merged[-1].n_bytes == hole.offset:
                merged[-1] = Extent(merged[-1].offset, merged[-1].n_bytes + hole.n_bytes)
            else:
                merged.append(hole)
        self._free = merged


class SharedMemory:
    """An anonymous file (memfd) mapped here and, by its descriptor, in a child. Freed with its last user."""

    def __init__(self, n_bytes: int, *, fd: int | None = None) -> None:
        """Make one; with `fd`, map the one that another process made."""
        self.fd = os.memfd_create("slipstream-pool") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, n_bytes)
        self.n_bytes = n_bytes
        self.buffer = mmap.mmap(self.fd, n_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def view(self, offset: int, n_bytes: int) -> memoryview:
        """The bytes [offset, offset + n_bytes). IndexError outside of it."""
        if offset < 0 or n_bytes < 1 or offset + n_bytes > self.n_bytes:
            raise IndexError(f"[{offset}, {offset + n_bytes}) of {self.n_bytes} bytes")
        return memory_at(self.address + offset, n_bytes)

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last reference to it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

"""Memory for tensors in a new file: packing writes into the pages that other processes map later."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from dataclasses import dataclass

import torch

from libs.engine.packed.packed_file import ALIGNED, protect

_LEAST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _MappedRange:
    begin: int  # in the file
    memory: mmap.mmap
    address: int


class FileMemory:
    """Tensors one after another. The file has room for them before they are written.

    A write to a page without room would end the process.
    """

    def __init__(self, descriptor: int, expected_bytes: int) -> None:
        """Raises OSError when the file system has no room for `expected_bytes`."""
        self.used_bytes = 0
        self._descriptor = descriptor
        self._regions: list[_MappedRange] = []
        self._grow(expected_bytes)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros. Raises OSError when the file system is full."""
        count = math.prod(shape)
        n_bytes = -(-count * dtype.itemsize // ALIGNED) * ALIGNED
        region = self._regions[-1]
        if self.used_bytes - region.begin + n_bytes > len(region.memory):
            region = self._grow(max(n_bytes, len(self._regions[0].memory) // 8))
        offset, self.used_bytes = self.used_bytes, self.used_bytes + n_bytes
        flat = torch.frombuffer(region.memory, dtype=dtype, count=count, offset=offset - region.begin)
        return flat.view(*shape)

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor is in the file; None if it is elsewhere."""
        for region in self._regions:
            if 0 <= tensor.data_ptr() - region.address < len(region.memory):
                return region.begin + tensor.data_ptr() - region.address
        return None

    def protect(self) -> None:
        """Let this process only read what it has written."""
        for region in self._regions:
            protect(region.address, len(region.memory))

    def _grow(self, n_bytes: int) -> _MappedRange:
        page = mmap.ALLOCATIONGRANULARITY
        last = self._regions[-1] if self._regions else None
        begin = last.begin + len(last.memory) if last else 0
        size = -(-max(n_bytes, _LEAST_BYTES) // page) * page
        reserve = getattr(os, "posix_fallocate", None)
        if reserve is None:
            raise OSError("this system reserves no room in files")
        reserve(self._descriptor, begin, size)
        memory = mmap.mmap(self._descriptor, size, mmap.MAP_SHARED, offset=begin)
        region = _MappedRange(begin, memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        self._regions.append(region)
        self.used_bytes = begin
        return region

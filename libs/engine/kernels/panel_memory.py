"""Memory for packed weights in large regions, for which the kernel is asked for huge pages."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

_FIRST_BYTES, _LARGEST_BYTES = 4 << 20, 1 << 30
_ALIGNED = 64


class PanelMemory:
    """Regions double in size, so that small models reserve little and large ones waste less than 1 %."""

    def __init__(self) -> None:
        self._region: mmap.mmap | None = None
        self._used_bytes = 0
        self._next_bytes = _FIRST_BYTES

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros. Its region is returned to the system after the last of its tensors."""
        count = math.prod(shape)
        n_bytes = -(-count * dtype.itemsize // _ALIGNED) * _ALIGNED
        if self._region is None or self._used_bytes + n_bytes > len(self._region):
            self._region, self._used_bytes = map_huge_pages(max(n_bytes, self._next_bytes)), 0
            self._next_bytes = min(2 * self._next_bytes, _LARGEST_BYTES)
        begin, self._used_bytes = self._used_bytes, self._used_bytes + n_bytes
        return torch.frombuffer(self._region, dtype=dtype, count=count, offset=begin).view(*shape)


def map_huge_pages(n_bytes: int) -> mmap.mmap:
    """New memory of this process."""
    region = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        try:
            region.madvise(advice)
        except OSError:  # a kernel without huge pages
            pass
    return region

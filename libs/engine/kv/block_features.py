"""Features of full blocks, by the blocks' hashes: what a reused prefix gives a draft head.

A page keeps no features, so a prompt with a cached prefix would begin its draft context after that prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from libs.engine.step.device_rows import FeatureArray, host_rows
from libs.engine.step.types import FloatArray

_SHARE_OF_KV = 16
_MAX_BYTES = 256 << 20


def feature_bytes(kv_bytes: int) -> int:
    """The bytes of features that an engine keeps, by the bytes of its KV."""
    return min(kv_bytes // _SHARE_OF_KV, _MAX_BYTES)


class BlockFeatures:
    """Holds at most `max_bytes` of rows; the least recently used blocks go first. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[bytes, FloatArray] = OrderedDict()
        self.n_bytes = 0

    def put(self, block_hash: bytes, rows: FeatureArray) -> None:
        """Keep a copy of one block's rows, in the host."""
        if block_hash in self._rows or rows.nbytes > self._max_bytes:
            return
        self._rows[block_hash] = np.array(host_rows(rows))
        self.n_bytes += self._rows[block_hash].nbytes
        while self.n_bytes > self._max_bytes:
            self.n_bytes -= self._rows.popitem(last=False)[1].nbytes

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Forget blocks whose KV is damaged: their rows may be, too."""
        for block_hash in hashes:
            rows = self._rows.pop(block_hash, None)
            if rows is not None:
                self.n_bytes -= rows.nbytes

    def newest(self, hashes: Sequence[bytes], n_blocks: int) -> FloatArray | None:
        """Rows of the last blocks of a prefix, at most `n_blocks` and without a gap; None without any."""
        found: list[FloatArray] = []
        for block_hash in reversed(hashes[-n_blocks:]):
            rows = self._rows.get(block_hash)
            if rows is None:
                break
            self._rows.move_to_end(block_hash)
            found.append(rows)
        return np.concatenate(found[::-1]) if found else None

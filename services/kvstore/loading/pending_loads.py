"""Blocks that one reader wants while they are loaded into memory, from a disk or from the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.kvstore.dram.slots import Block
from services.kvstore.dram.tier import DramTier


class PendingLoads:
    """Those that came are held once for the reader until he takes them. Event loop only."""

    def __init__(self, dram: DramTier, keys: Iterable[bytes], *, leave: Callable[[set[bytes]], None]) -> None:
        """`leave` tells who loads them which ones are not wanted any longer."""
        self._dram = dram
        self._leave = leave
        self._left = set(keys)
        self._came: dict[bytes, Block[bytes]] = {}

    @property
    def came_blocks(self) -> int:
        """Those that came and were not taken yet."""
        return len(self._came)

    @property
    def came_bytes(self) -> int:
        """Of those."""
        return sum(block.n_bytes for block in self._came.values())

    def take(self, key: bytes) -> Block[bytes] | None:
        """The block, whose hold is the caller's now; None when it did not come, or was taken."""
        return self._came.pop(key, None)

    def end(self) -> None:
        """Nothing more is wanted: let go of what was not taken. Idempotent."""
        self._leave(self._left)
        self._left = set()
        for block in self._came.values():
            self._dram.table.unhold(block)
        self._came.clear()

    def settle(self, key: bytes, block: Block[bytes] | None) -> None:
        """The block came, held for this one, or did not."""
        self._left.discard(key)
        if block is not None:
            self._came[key] = block

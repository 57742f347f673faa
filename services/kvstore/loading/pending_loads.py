"""Blocks that one reader waits for while they are loaded into memory, from a disk or from the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.kvstore.dram.slots import Block
from services.kvstore.dram.tier import DramTier


class PendingLoads:
    """A reader's loads. Each loaded block is held once until the reader pops it. Event loop only."""

    def __init__(
        self, dram: DramTier, keys: Iterable[bytes], *, cancel: Callable[[set[bytes]], None]
    ) -> None:
        """`cancel(keys)` reports the blocks that the reader no longer wants."""
        self._dram = dram
        self._cancel = cancel
        self._pending = set(keys)
        self._loaded_by_key: dict[bytes, Block[bytes]] = {}

    @property
    def loaded_blocks(self) -> int:
        """Number of loaded blocks that were not popped yet."""
        return len(self._loaded_by_key)

    @property
    def loaded_bytes(self) -> int:
        """The bytes of the loaded blocks."""
        return sum(block.n_bytes for block in self._loaded_by_key.values())

    def pop(self, key: bytes) -> Block[bytes] | None:
        """The block, with its hold; None if it was not loaded or was popped before."""
        return self._loaded_by_key.pop(key, None)

    def close(self) -> None:
        """Cancel the pending loads and release the blocks that were not popped. Idempotent."""
        self._cancel(self._pending)
        self._pending = set()
        for block in self._loaded_by_key.values():
            self._dram.table.unhold(block)
        self._loaded_by_key.clear()

    def complete(self, key: bytes, block: Block[bytes] | None) -> None:
        """Record that the block was loaded, with one hold for this reader, or that the load failed (None)."""
        self._pending.discard(key)
        if block is not None:
            self._loaded_by_key[key] = block

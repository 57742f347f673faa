"""The DRAM tier: one registered arena, cut into slabs of slots. No allocation per block.

The value of a block is its payload's checksum. Slots are page-aligned and page-rounded, so that the
disk tier reads and writes them directly.
"""

from __future__ import annotations

from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from services.kvstore.dram.slots import Block, Slot, SlotTable

MAX_SLAB_BYTES = 64 << 20


def slab_bytes_for(dram_bytes: int) -> int:
    """At least 8 slabs, so that the room of one block size can go to another."""
    return min(MAX_SLAB_BYTES, dram_bytes // 8 // PAGE_BYTES * PAGE_BYTES)


class DramTier:
    """Blocks in memory that peers can read. Used from the event loop only."""

    def __init__(self, dram_bytes: int, *, tenant_share: float = 1.0) -> None:
        """`tenant_share`: the part of it that the blocks of one tenant may fill."""
        slab_bytes = slab_bytes_for(dram_bytes)
        if not slab_bytes:
            raise ValueError(f"{dram_bytes} bytes of memory are too few")
        n_slabs = dram_bytes // slab_bytes
        self.memory = PageAlignedMemory(n_slabs * slab_bytes)
        self.table: SlotTable[bytes] = SlotTable(
            n_slabs=n_slabs, slab_bytes=slab_bytes, tenant_share=tenant_share
        )

    def address_of(self, slot: Slot) -> int:
        """Address of the slot's first byte."""
        return self.memory.address + slot.slab * self.table.slab_bytes + slot.index * slot.slot_bytes

    def get(self, key: bytes) -> Block[bytes] | None:
        """The block, or None."""
        return self.table.get(key)

"""The DRAM tier: one registered arena, cut into slabs of slots, without allocation per block.

A block's value is its payload's checksum. Slots are page-aligned and page-rounded, so that the disk tier
reads and writes them directly.
"""

from __future__ import annotations

from libs.common.checksum import UNKEYED, KvChecksum
from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from services.kvstore.dram.slots import Block, Slot, SlotTable

MAX_SLAB_BYTES = 64 << 20


def slab_bytes_for(dram_bytes: int) -> int:
    """Slab size with at least 8 slabs, so that one block size can take over the room of another."""
    return min(MAX_SLAB_BYTES, dram_bytes // 8 // PAGE_BYTES * PAGE_BYTES)


class DramTier:
    """Blocks in memory that peers can read, and write with Mooncake. Event loop only.

    A block's checksum is the writer's, and no tier computes a new one from the slot. So a reader finds any
    later write into the slot.
    """

    def __init__(self, dram_bytes: int, *, tenant_share: float = 1.0, checksum: KvChecksum = UNKEYED) -> None:
        """`tenant_share`: the part of the memory that the blocks of one tenant may fill."""
        self.checksum = checksum
        slab_bytes = slab_bytes_for(dram_bytes)
        if not slab_bytes:
            raise ValueError(f"{dram_bytes} bytes of memory are too few")
        n_slabs = dram_bytes // slab_bytes
        self.memory = PageAlignedMemory(n_slabs * slab_bytes, field="dram_bytes")
        self.table: SlotTable[bytes] = SlotTable(
            n_slabs=n_slabs, slab_bytes=slab_bytes, tenant_share=tenant_share
        )

    def address_of(self, slot: Slot) -> int:
        """Address of the slot's first byte."""
        return self.memory.address + slot.slab * self.table.slab_bytes + slot.index * slot.slot_bytes

    def get(self, key: bytes) -> Block[bytes] | None:
        """The block, or None."""
        return self.table.get(key)

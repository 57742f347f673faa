"""A block and a segment of a disk, as the index knows them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.kvstore.dram.slots import Slot


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """A snapshot of a published block. `row` identifies it until it is dropped and released."""

    key: bytes
    slot: Slot
    n_bytes: int
    generation: int
    checksum: bytes
    row: int


@dataclass(slots=True)
class Slab:
    """One segment. `slot_bytes` is 0 before its first cut. `taken`: number of slots that are not free."""

    slot_bytes: int = 0
    first_row: int = 0
    n_slots: int = 0
    taken: int = 0
    published: int = 0
    cut_generation: int = 0
    retired: bool = False

"""The slots of one disk: free slots, published blocks and the choice of evicted blocks. Pure.

The counterpart of `dram/slots.py` for disks, in columns of numbers (`table/index.py`), since a disk has
millions of blocks. A slab is a segment file. It is cut into slots of one size, and cut for another size once
all its blocks may be evicted.

`block_use.py` chooses the evicted block; a tenant at its share evicts its own blocks. A held block keeps
its slot until the last hold is released.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from libs.common.transport.registered_memory import page_rounded
from services.kvstore.disk.segment_format import FoundHeaders, slots_in
from services.kvstore.disk.table.block import DiskBlock, Slab
from services.kvstore.disk.table.block_use import BlockUse
from services.kvstore.disk.table.index import WORDS, DiskIndex, IndexColumns
from services.kvstore.disk.table.policy import NO_KIND, UNKNOWN, BlockOrigin, DiskPolicy
from services.kvstore.disk.table.quota import PUBLIC, UNKNOWN_TENANT, DiskQuota
from services.kvstore.dram.slots import Slot
from services.kvstore.policy.quota import NO_TENANT


class DiskTable:
    """Slots and blocks of one disk. Single-threaded."""

    def __init__(
        self,
        *,
        n_slabs: int,
        slab_bytes: int,
        tenant_share: float = 1.0,
    ) -> None:
        """`tenant_share`: the part of all slots that one tenant may fill."""
        self.slab_bytes = slab_bytes
        whole = n_slabs * slab_bytes
        self.quota = DiskQuota(int(whole * tenant_share)) if tenant_share < 1.0 else None
        self.slabs = [Slab() for _ in range(n_slabs)]
        self._uncut = list(reversed(range(n_slabs)))
        self._columns = IndexColumns()
        self._index = DiskIndex(self._columns)
        self._free: dict[int, array[int]] = {}  # rows, by slot size
        self._spare_rows: dict[int, list[int]] = {}  # first rows of former cuts, by their number of rows
        self._holds: dict[int, int] = {}
        self._held_gone: set[int] = set()
        self.use = BlockUse(
            self._columns,
            self._index,
            self.slabs,
            self._holds.keys(),
            quota=self.quota,
            rng=random.Random(0),  # of samples: their seed need not differ
        )
        self.n_bytes = 0
        self.evictions = 0
        self.may_grow = True  # False while the filesystem has no room for another segment
        # Receives every block that is published (True) or dropped (False), at once.
        self.on_change: Callable[[bytes, bool], None] = lambda key, held: None

    @property
    def n_slabs(self) -> int:
        """Number of segments, cut or not."""
        return len(self.slabs)

    @property
    def n_blocks(self) -> int:
        """Number of published blocks."""
        return len(self._index)

    @property
    def n_held(self) -> int:
        """Number of held slots."""
        return len(self._holds)

    @property
    def max_block_bytes(self) -> int:
        """The largest payload of a slot."""
        return max(0, self.slab_bytes - page_rounded(1)) if self.slabs else 0

    @property
    def index_bytes(self) -> int:
        """Memory of the index, in bytes."""
        free = sum(len(rows) * rows.itemsize for rows in self._free.values())
        table = self._columns.n_bytes_of_memory + self._index.n_bytes_of_memory
        return table + free + self.use.memory_bytes

    @property
    def policy(self) -> DiskPolicy | None:
        """The eviction policy; None before the first slab is cut."""
        return self.use.policy

    def keys(self) -> list[bytes]:
        """The hashes of all published blocks."""
        packed = self._columns.key[self.rows()].tobytes()
        return [packed[at : at + 16] for at in range(0, len(packed), 16)]

    def rows(self) -> np.ndarray:
        """The rows of all published blocks, ascending."""
        return np.flatnonzero(self._columns.published)

    def contains(self, key: bytes) -> bool:
        """Whether the block is published."""
        return self._index.find(key) >= 0

    def held(self, chain: Sequence[bytes]) -> np.ndarray:
        """Whether each block of the chain is published: bool, in its order."""
        return self._index.find_many(chain) >= 0

    def get(self, key: bytes) -> DiskBlock | None:
        """The block, or None."""
        row = self._index.find(key)
        return None if row < 0 else self.at(row)

    def get_many(self, keys: Sequence[bytes]) -> list[DiskBlock | None]:
        """The blocks, None for missing ones; faster than single lookups."""
        rows = self._index.find_many(keys)
        columns, safe = self._columns, np.maximum(rows, 0)
        if not columns.n_rows:
            return [None] * len(keys)
        return [
            None
            if row < 0
            else DiskBlock(key, self._slot_in(slab, row), n_bytes, generation, checksum.tobytes(), row)
            for key, row, slab, n_bytes, generation, checksum in zip(
                keys,
                rows.tolist(),
                columns.slab[safe].tolist(),
                columns.n_bytes[safe].tolist(),
                columns.generation[safe].tolist(),
                columns.checksum[safe],
                strict=True,
            )
        ]

    def at(self, row: int) -> DiskBlock | None:
        """The block in that row, or None."""
        cells = self._columns.cells
        if row >= len(cells.published) or not cells.published[row]:
            return None
        return DiskBlock(
            self._columns.key_of(row),
            self._slot(row),
            cells.n_bytes[row],
            cells.generation[row],
            WORDS.pack(cells.checksum[2 * row], cells.checksum[2 * row + 1]),
            row,
        )

    def allocate(self, n_bytes: int, *, generation: int, tenant: bytes = NO_TENANT) -> Slot | None:
        """A slot for `n_bytes`, after an eviction if needed. None if no block can be evicted for it.

        A slab that is cut for it stores `generation`, that of the last write before this one.
        """
        slot_bytes = page_rounded(n_bytes)
        if n_bytes < 1 or not slots_in(self.slab_bytes, slot_bytes):
            return None
        number = self.quota.number_of(tenant) if self.quota is not None else PUBLIC
        if not self.use.make_tenant_room(number, slot_bytes, self._evict):
            return None
        free = self._free.get(slot_bytes)
        if not free:
            self._make_room(slot_bytes, generation)
            free = self._free.get(slot_bytes)
        if not free:
            return None
        row = free.pop()
        slot = self._slot(row)
        self.slabs[slot.slab].taken += 1
        self._columns.cells.tenant[row] = number
        if self.quota is not None:
            self.quota.add(number, slot_bytes)
        return slot

    def publish(
        self,
        key: bytes,
        slot: Slot,
        n_bytes: int,
        generation: int,
        checksum: bytes,
        origin: BlockOrigin = UNKNOWN,
    ) -> None:
        """Publish block `key` in the taken slot. Raises ValueError if the block is published already."""
        row, cells = self._row(slot), self._columns.cells
        if not self._index.add(key, row):
            raise ValueError(f"block {key.hex()} is there already")
        cells.key[2 * row], cells.key[2 * row + 1] = WORDS.unpack(key)
        cells.checksum[2 * row], cells.checksum[2 * row + 1] = WORDS.unpack(checksum)
        cells.generation[row], cells.n_bytes[row] = generation, n_bytes
        cells.published[row] = True
        self.use.published(key, row, origin)
        self.slabs[slot.slab].published += 1
        self.n_bytes += n_bytes
        self.on_change(key, True)

    def free(self, slot: Slot) -> None:
        """Free a taken slot that was not published."""
        self._release(self._row(slot))

    def hold(self, block: DiskBlock) -> None:
        """Keep the slot unchanged until a matching `unhold`."""
        self._holds[block.row] = self._holds.get(block.row, 0) + 1

    def unhold(self, block: DiskBlock) -> None:
        """Release one hold. Raises ValueError when there is none."""
        if block.row not in self._holds:
            raise ValueError(f"block {block.key.hex()} is not held")
        self._holds[block.row] -= 1
        if not self._holds[block.row]:
            del self._holds[block.row]
            if block.row in self._held_gone:
                self._held_gone.remove(block.row)
                self._release(block.row)

    def touch(self, chain: Sequence[bytes], *, tenant: bytes = NO_TENANT, now_ms: float = 0.0) -> np.ndarray:
        """Record a use of the chain's blocks, present or not; the chain's start becomes the most recent.

        Returns which blocks are present: bool, in its order.
        """
        return self.use.want(chain, tenant=tenant, now_ms=now_ms)

    def drop(self, block: DiskBlock) -> bool:
        """Drop the block; False if it was gone or another block is in its slot."""
        cells, row = self._columns.cells, block.row
        if not cells.published[row] or cells.generation[row] != block.generation:
            return False
        self._drop_row(row)
        return True

    def drop_all(self, blocks: Sequence[DiskBlock]) -> None:
        """Drop all these blocks; much faster than single drops if blocks follow them in their chains."""
        self._drop_rows(np.array([block.row for block in blocks], np.int64))

    def retire(self, slab: int) -> list[bytes]:
        """Drop all blocks of the slab and exclude it until `revive`; returns the hashes."""
        self.slabs[slab].retired = True
        if slab in self._uncut:
            self._uncut.remove(slab)
        rows = self._rows_of(slab)
        doomed = rows[self._columns.published[rows]]
        keys = [self._columns.key_of(row) for row in doomed.tolist()]
        self._drop_rows(doomed)
        self._remove_free_rows(slab)
        return keys

    def revive(self, slab: int) -> bool:
        """Allow a retired slab to be cut again; False while reads or writes use it."""
        found = self.slabs[slab]
        if not found.retired or found.taken:
            return False
        if found.n_slots:
            self._spare_rows.setdefault(found.n_slots, []).append(found.first_row)
        self.slabs[slab] = Slab()
        self._uncut.insert(0, slab)
        return True

    def restore(self, slab: int, slot_bytes: int, cut_generation: int, found: FoundHeaders) -> None:
        """Cut a slab as found on disk, with its blocks. `index_restored` ends the recovery."""
        self._uncut.remove(slab)
        self._cut(slab, slot_bytes, cut_generation)
        columns, first = self._columns, self.slabs[slab].first_row
        rows = found.index.astype(np.int64) + first
        columns.key[rows], columns.checksum[rows] = found.key, found.checksum
        columns.n_bytes[rows], columns.generation[rows] = found.n_bytes, found.generation
        columns.published[rows], columns.tenant[rows] = True, UNKNOWN_TENANT

    def index_restored(self) -> int:
        """Index the restored blocks, the newest of each key; returns the highest generation."""
        columns = self._columns
        rows = self.rows()
        key, generation = columns.key[rows], columns.generation[rows]
        order = np.lexsort((generation, key[:, 1], key[:, 0]))
        rows, key = rows[order], key[order]
        newest = np.ones(len(rows), np.bool_)
        newest[:-1] = (key[:-1] != key[1:]).any(axis=1)
        columns.published[rows[~newest]] = False
        rows = rows[newest]
        self._index.rebuild(rows)
        self.n_bytes = int(columns.n_bytes[rows].sum())
        counts = np.bincount(columns.slab[rows], minlength=len(self.slabs))
        self._free.clear()
        for number, slab in enumerate(self.slabs):
            slab.taken = slab.published = int(counts[number])
            if slab.slot_bytes:
                mine = self._rows_of(number)
                empty = mine[~columns.published[mine]][::-1]
                self._free_rows(slab.slot_bytes).extend(empty.tolist())
        self.use.restored()
        return int(columns.generation[rows].max(initial=0))

    def _slot(self, row: int) -> Slot:
        return self._slot_in(self._columns.cells.slab[row], row)

    def _slot_in(self, number: int, row: int) -> Slot:
        slab = self.slabs[number]
        return Slot(number, row - slab.first_row, slab.slot_bytes)

    def _row(self, slot: Slot) -> int:
        return self.slabs[slot.slab].first_row + slot.index

    def _rows_of(self, slab: int) -> np.ndarray:
        found = self.slabs[slab]
        return np.arange(found.first_row, found.first_row + found.n_slots)

    def _free_rows(self, slot_bytes: int) -> array[int]:
        return self._free.setdefault(slot_bytes, array("I"))

    def _evict(self, row: int) -> int:
        self.evictions += 1
        return self._drop_row(row, evicted=True)

    def _drop_row(self, row: int, *, evicted: bool = False) -> int:
        """Drop the block in that row; returns the row of its predecessor, or -1."""
        cells = self._columns.cells
        slab, key = self.slabs[cells.slab[row]], self._columns.key_of(row)
        self._index.remove(row)
        cells.published[row] = False
        slab.published -= 1
        self.n_bytes -= cells.n_bytes[row]
        before = self.use.gone(key, row, evicted=evicted)
        if row in self._holds:
            self._held_gone.add(row)
        else:
            self._release(row)
        self.on_change(key, False)
        return before

    def _drop_rows(self, rows: np.ndarray) -> None:
        self.use.all_gone(rows)
        for row in rows.tolist():
            self._drop_row(row)

    def _release(self, row: int) -> None:
        cells = self._columns.cells
        slab = self.slabs[cells.slab[row]]
        slab.taken -= 1
        if self.quota is not None:
            self.quota.add(cells.tenant[row], -slab.slot_bytes)
        cells.tenant[row] = PUBLIC
        if not slab.retired:
            self._free_rows(slab.slot_bytes).append(row)

    def _make_room(self, slot_bytes: int, generation: int) -> None:
        """Free a slot of that size: from a new slab, an evicted block, or a slab of another size."""
        if self._uncut and self.may_grow:
            self._cut_free(self._uncut.pop(), slot_bytes, generation)
        elif not self.use.evict(slot_bytes, self._evict):
            emptiest = min(
                (number for number, slab in enumerate(self.slabs) if self._may_be_cut_again(number, slab)),
                key=lambda number: self.slabs[number].published,
                default=None,
            )
            if emptiest is not None:
                self.evictions += self.slabs[emptiest].published
                self.retire(emptiest)
                if self.revive(emptiest):
                    self._uncut.remove(emptiest)
                    self._cut_free(emptiest, slot_bytes, generation)

    def _may_be_cut_again(self, number: int, slab: Slab) -> bool:
        first, end = slab.first_row, slab.first_row + slab.n_slots
        return (
            slab.slot_bytes > 0
            and not slab.retired
            and slab.taken == slab.published
            and not any(first <= row < end for row in self._holds)
        )

    def _cut_free(self, number: int, slot_bytes: int, generation: int) -> None:
        self._cut(number, slot_bytes, generation)
        self._free_rows(slot_bytes).extend(self._rows_of(number)[::-1].tolist())

    def _cut(self, number: int, slot_bytes: int, generation: int) -> None:
        n_slots = slots_in(self.slab_bytes, slot_bytes)
        spare = self._spare_rows.get(n_slots)
        first = spare.pop() if spare else self._columns.grow(n_slots)
        self.slabs[number] = Slab(slot_bytes, first, n_slots, cut_generation=generation)
        columns, rows = self._columns, slice(first, first + n_slots)
        columns.slab[rows], columns.published[rows] = number, False
        columns.parent[rows], columns.children[rows], columns.tenant[rows] = 0, 0, PUBLIC
        columns.kind[rows], columns.depth[rows] = NO_KIND, 0
        self.use.resize(n_slots, len(self._uncut) if self.may_grow else 0)

    def _remove_free_rows(self, slab: int) -> None:
        found = self.slabs[slab]
        rows = self._free.get(found.slot_bytes)
        if rows:
            all_rows = np.array(rows, np.int64)
            elsewhere = (all_rows < found.first_row) | (all_rows >= found.first_row + found.n_slots)
            self._free[found.slot_bytes] = array("I", all_rows[elsewhere].tolist())

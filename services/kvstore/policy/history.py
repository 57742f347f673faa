"""What the eviction policies remember of blocks, held or not: chains, wants and kinds. Pure.

Time is counted in wanted blocks, as cache pressure is. The kind of a block says how often it was wanted and
how long after the want before; of a block wanted once, whether it ends its chain.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from zlib import crc32

# Blocks remembered beyond the capacity, and at most four times the capacity or the second number.
MIN_GHOST_BLOCKS = 8_192
MAX_GHOST_BLOCKS = 65_536

FREE, CHAIN_END, FIRST_WANT = 0, 1, 2
N_GAPS = 3
_FREQUENCY_OF_WANTS = (0, 0, 1, 2, 3, 3, 4, 4, 4, 4, *([5] * 22))
N_FREQUENCIES = 7
N_KINDS = FIRST_WANT + 1 + (N_FREQUENCIES - 1) * N_GAPS
# The frequency of each kind: kinds of one frequency are alike.
FREQUENCY_OF_KIND = (0, 0, 0, *(f for f in range(1, N_FREQUENCIES) for _ in range(N_GAPS)))


class BlockRecord:
    """One remembered block.

    `held` has the bit of each policy that holds it. `queue`: the tier's one in which it is, None when the
    tier has it not. `evicted_ms`: when the policy evicted it, below 0 after a want.
    """

    __slots__ = (
        "depth",
        "evicted_ms",
        "held",
        "key",
        "kind",
        "last",
        "parent",
        "queue",
        "row",
        "sampled",
        "wants",
    )

    def __init__(self, key: bytes, parent: BlockRecord | None, row: int, *, sampled: bool) -> None:
        self.key = key
        self.parent = parent
        self.row = row
        self.sampled = sampled
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.wants = 0
        self.last = 0
        self.kind = FREE
        self.held = 0
        self.queue: Queue | None = None
        self.evicted_ms = -1.0

    @property
    def present(self) -> bool:
        """Whether the tier has the block."""
        return self.queue is not None


Queue = OrderedDict[BlockRecord, None]  # the next to leave first


class ReuseAge:
    """`n_blocks` of one kind were wanted again, or forgotten, at that age."""

    __slots__ = ("age", "kind", "n_blocks")

    def __init__(self, kind: int, age: int) -> None:
        self.kind = kind
        self.age = age
        self.n_blocks = 1


class History:
    """Records by key, in the order of their last wants, the longest ago first."""

    def __init__(self, capacity_blocks: int, *, sample_rate: int) -> None:
        """One block in `sample_rate` is sampled, by its hash."""
        self.now = 0  # wanted blocks so far
        self.resize(capacity_blocks, sample_rate=sample_rate)
        # By the records' rows, for numpy; kind FREE where there is no record.
        self.last = array("q")
        self.kind = array("q")
        self._records: OrderedDict[bytes, BlockRecord] = OrderedDict()
        self.get = self._records.get  # the record of a block, or None
        self._free_rows: list[int] = []

    def __len__(self) -> int:
        return len(self._records)

    def records(self) -> Iterable[BlockRecord]:
        """All records; they must not change meanwhile."""
        return self._records.values()

    def resize(self, capacity_blocks: int, *, sample_rate: int) -> None:
        """Set the tier's capacity and the sample's rate, by which records enter and leave the sample."""
        self.capacity_blocks = capacity_blocks
        self._sample_rate = sample_rate
        most = max(capacity_blocks, MAX_GHOST_BLOCKS)
        # Blocks remembered at most, but for those that some cache holds.
        self.max_blocks = capacity_blocks + max(MIN_GHOST_BLOCKS, min(4 * capacity_blocks, most))

    def want(self, chain: Sequence[bytes]) -> tuple[list[BlockRecord], list[ReuseAge]]:
        """The records of a wanted chain in its order, new where needed, and the waits that ended."""
        get = self.get
        self.now += len(chain)
        path: list[BlockRecord] = []
        parent: BlockRecord | None = None
        for key in dict.fromkeys(chain):
            record = get(key)
            if record is None:
                record = self._new(key, parent)
            elif record.parent is None and parent is not None and not record.held | record.present:
                self._link(record, parent)
            path.append(record)
            parent = record
        return path, self._note_wants(path)

    def begin(self, key: bytes) -> BlockRecord:
        """A record of a block that is stored before any request wants it."""
        record = self._new(key, None)
        record.wants, record.last = 1, self.now
        self._set_kind(record, FIRST_WANT)
        return record

    def is_sampled(self, key: bytes) -> bool:
        """Whether the simulated caches see the block."""
        return (crc32(key) * 0x9E3779B1 >> 16) % self._sample_rate == 0

    def drop_old(self) -> list[ReuseAge]:
        """Forget what is beyond `max_blocks` and in no cache, the longest not wanted first."""
        waits: list[ReuseAge] = []
        records, kinds, free_rows = self._records, self.kind, self._free_rows
        kind_before = last_before = -1
        for _ in range(len(records) - self.max_blocks):
            key, record = records.popitem(last=False)
            if record.held or record.queue is not None:
                records[key] = record
                continue
            if record.kind == kind_before and record.last == last_before:
                waits[-1].n_blocks += 1
            else:
                kind_before, last_before = record.kind, record.last
                waits.append(ReuseAge(kind_before, self.now - last_before))
            kinds[record.row] = FREE
            free_rows.append(record.row)
        return waits

    def _note_wants(self, path: Sequence[BlockRecord]) -> list[ReuseAge]:
        """Count the want in each record. Neighbours mostly have one past: their kind is computed once."""
        waits: list[ReuseAge] = []
        now, move_to_end = self.now, self._records.move_to_end
        lasts, kinds = self.last, self.kind
        wants_before = last_before = kind_before = kind = -1
        ends_chain = True
        for record in reversed(path):
            move_to_end(record.key)
            wants, last = record.wants, record.last
            if wants != wants_before or last != last_before or record.kind != kind_before:
                wants_before, last_before, kind_before = wants, last, record.kind
                kind = self._kind_of(wants + 1, now - last, ends_chain=ends_chain)
                if wants:
                    waits.append(ReuseAge(kind_before, now - last))
            elif wants:
                waits[-1].n_blocks += 1
            if ends_chain:
                ends_chain, wants_before = False, -1
            record.wants = wants + 1
            record.last = lasts[record.row] = now
            record.kind = kinds[record.row] = kind
        return waits

    def _kind_of(self, wants: int, gap: int, *, ends_chain: bool) -> int:
        if wants == 1:
            return CHAIN_END if ends_chain else FIRST_WANT
        frequency = _FREQUENCY_OF_WANTS[wants] if wants < 32 else N_FREQUENCIES - 1
        distance = 0 if gap < self.capacity_blocks else 1 if gap < 4 * self.capacity_blocks else 2
        return FIRST_WANT + 1 + (frequency - 1) * N_GAPS + distance

    def _new(self, key: bytes, parent: BlockRecord | None) -> BlockRecord:
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = len(self.last)
            self.last.append(0)
            self.kind.append(FREE)
        sampled = self._sample_rate == 1 or self.is_sampled(key)
        record = self._records[key] = BlockRecord(key, parent, row, sampled=sampled)
        return record

    def _link(self, record: BlockRecord, parent: BlockRecord) -> None:
        """Put a block that was met without its chain into it; no cache counts on its place yet."""
        if not _is_ancestor(record, parent):
            record.parent, record.depth = parent, parent.depth + 1

    def _set_kind(self, record: BlockRecord, kind: int) -> None:
        record.kind = self.kind[record.row] = kind
        self.last[record.row] = record.last


def _is_ancestor(record: BlockRecord, below: BlockRecord | None) -> bool:
    while below is not None:
        if below is record:
            return True
        below = below.parent
    return False

"""Hash table from block hash to slot, over columns of numbers: about 95 bytes a block. Pure.

A slot's id is its row in the columns. The table uses open addressing with linear probing over u32: 0 is
empty, 1 is removed, else id + 2. It is at most half full. Chains are looked up in one vectorised pass,
because a prompt has thousands of blocks.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

KEY_BYTES = 16
WORDS = struct.Struct("=QQ")  # a key or a checksum as stored in the columns
# Keys are hashes already; the multiplier also spreads the keys of tests.
_SPREAD = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_MIN_BUCKETS = 256
_MIN_ROWS = 256
_NO_ROWS: np.ndarray = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Cells:
    """The columns as memoryviews, which read single numbers much faster than numpy.

    Keys and checksums take two numbers per row.
    """

    key: memoryview
    checksum: memoryview
    generation: memoryview
    used: memoryview
    n_bytes: memoryview
    slab: memoryview
    parent: memoryview
    children: memoryview
    depth: memoryview
    kind: memoryview
    tenant: memoryview
    published: memoryview

    @classmethod
    def of(cls, columns: IndexColumns) -> Cells:
        """The cells of these columns, valid until the columns grow."""
        return cls(*(memoryview(getattr(columns, each.name).reshape(-1)) for each in fields(cls)))


class IndexColumns:
    """One row for each slot of a disk that was ever cut.

    All arrays have one length, slightly above the used rows.
    """

    def __init__(self) -> None:
        self.n_rows = 0
        self.key = np.zeros((0, 2), np.uint64)
        self.checksum = np.zeros((0, 2), np.uint64)
        self.generation = np.zeros(0, np.uint64)
        self.used = np.zeros(0, np.int64)  # last use, in ticks
        self.n_bytes = np.zeros(0, np.uint32)
        self.slab = np.zeros(0, np.uint32)
        self.parent = np.zeros(0, np.uint32)  # row of the preceding block + 1; 0: unknown
        self.children = np.zeros(0, np.uint32)  # number of rows with this parent
        self.depth = np.zeros(0, np.uint16)  # number of preceding blocks
        self.kind = np.zeros(0, np.uint16)  # the eviction policy's class
        self.tenant = np.zeros(0, np.uint16)  # the quota's number of the tenant
        self.published = np.zeros(0, np.bool_)
        self.cells = Cells.of(self)

    def grow(self, n_rows: int) -> int:
        """Add rows; returns the first new one."""
        first, self.n_rows = self.n_rows, self.n_rows + n_rows
        if self.n_rows > len(self.slab):
            added = max(self.n_rows, len(self.slab) * 9 // 8, _MIN_ROWS) - len(self.slab)
            for name, old in self._arrays():
                setattr(self, name, np.concatenate([old, np.zeros((added, *old.shape[1:]), old.dtype)]))
            self.cells = Cells.of(self)
        return first

    def key_of(self, row: int) -> bytes:
        """The key in that row."""
        words = self.cells.key
        return WORDS.pack(words[2 * row], words[2 * row + 1])

    @property
    def n_bytes_of_memory(self) -> int:
        """Memory of the columns, in bytes."""
        return sum(int(column.nbytes) for _, column in self._arrays())

    def _arrays(self) -> list[tuple[str, np.ndarray]]:
        return [(name, value) for name, value in vars(self).items() if isinstance(value, np.ndarray)]


class DiskIndex:
    """Key to row. The caller fills the columns."""

    def __init__(self, columns: IndexColumns) -> None:
        self._columns = columns
        self._asked: bytes | None = None  # the last chain, until the next change
        self._found = _NO_ROWS
        self._reset(_MIN_BUCKETS)

    def __len__(self) -> int:
        return self._n_keys

    @property
    def n_bytes_of_memory(self) -> int:
        """Memory of the table, in bytes."""
        return sys.getsizeof(self._buckets) + int(self._buckets.nbytes)

    def find(self, key: bytes) -> int:
        """The row of the key, or -1."""
        low, high = WORDS.unpack(key)
        refs, words, mask = self._refs, self._columns.cells.key, self._mask
        bucket = (((low ^ high) * _SPREAD) & _MASK64) >> self._shift
        while ref := refs[bucket]:
            if ref > 1 and words[2 * ref - 4] == low and words[2 * ref - 3] == high:
                return int(ref) - 2
            bucket = (bucket + 1) & mask
        return -1

    def find_many(self, keys: Sequence[bytes]) -> np.ndarray:
        """The rows of the keys, -1 where there is none: i64, in their order."""
        joined = b"".join(keys)
        if self._asked == joined:
            return self._found  # a lookup finds the chain, then records its use
        wanted = np.frombuffer(joined, np.uint64).reshape(-1, 2)
        found = np.full(len(wanted), -1, np.int64)
        left, at = np.arange(len(wanted)), self._homes(wanted)
        if not self._columns.n_rows:
            return found
        while left.size:
            refs = self._buckets[at].astype(np.int64) - 2
            there = self._columns.key[np.maximum(refs, 0)]
            same = (refs >= 0) & (there[:, 0] == wanted[:, 0]) & (there[:, 1] == wanted[:, 1])
            found[left[same]] = refs[same]
            going_on = (refs != -2) & ~same
            left, wanted, at = left[going_on], wanted[going_on], (at[going_on] + 1) & self._mask
        found.flags.writeable = False
        self._asked, self._found = joined, found
        return found

    def add(self, key: bytes, row: int) -> bool:
        """Map the key to the row; returns False and changes nothing if another row has the key."""
        if 2 * (self._n_filled + 1) > len(self._refs):
            # The row may be published or not: it is added once, below.
            self.rebuild(np.setdiff1d(np.flatnonzero(self._columns.published), [row]))
        low, high = WORDS.unpack(key)
        refs, words, mask = self._refs, self._columns.cells.key, self._mask
        bucket, chosen = (((low ^ high) * _SPREAD) & _MASK64) >> self._shift, -1
        while ref := refs[bucket]:
            if ref > 1:
                if words[2 * ref - 4] == low and words[2 * ref - 3] == high:
                    return False
            elif chosen < 0:
                chosen = bucket
            bucket = (bucket + 1) & mask
        if chosen < 0:
            chosen = bucket
            self._n_filled += 1
        self._n_keys += 1
        self._asked = None
        refs[chosen] = row + 2
        return True

    def remove(self, row: int) -> None:
        """Remove the row's key. Raises KeyError if it is not in the table."""
        words, refs, mask, ref = self._columns.cells.key, self._refs, self._mask, row + 2
        bucket = (((words[2 * row] ^ words[2 * row + 1]) * _SPREAD) & _MASK64) >> self._shift
        while (found := refs[bucket]) != ref:
            if not found:
                raise KeyError(row)
            bucket = (bucket + 1) & mask
        refs[bucket] = 1
        self._n_keys -= 1
        self._asked = None

    def rebuild(self, rows: np.ndarray) -> None:
        """Replace the contents by exactly these rows, whose keys differ."""
        self._reset(max(_MIN_BUCKETS, 1 << (3 * len(rows)).bit_length()))
        left = rows.astype(np.int64)
        at = self._homes(self._columns.key[left])
        while left.size:
            empty = self._buckets[at] == 0
            self._buckets[at[empty]] = (left[empty] + 2).astype(
                np.uint32
            )  # for equal buckets the last row stays
            lost = self._buckets[at] != left + 2
            left, at = left[lost], (at[lost] + 1) & self._mask
        self._n_keys = self._n_filled = len(rows)

    def _reset(self, n_buckets: int) -> None:
        self._buckets = np.zeros(n_buckets, np.uint32)
        self._refs = memoryview(self._buckets)  # type: ignore[arg-type]
        self._mask = n_buckets - 1
        self._shift = 65 - n_buckets.bit_length()
        self._n_keys = self._n_filled = 0
        self._asked, self._found = None, _NO_ROWS

    def _homes(self, keys: np.ndarray) -> np.ndarray:
        folded: np.ndarray = keys[:, 0] ^ keys[:, 1]
        return ((folded * np.uint64(_SPREAD)) >> np.uint64(self._shift)).astype(np.int64)

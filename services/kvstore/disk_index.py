"""Which slot has a block: a hash table over columns of numbers, about 95 bytes a block. Pure.

A slot's id is its row in the columns. The table is open addressing with linear probing over u32: 0 is
empty, 1 was removed, else id + 2. It is at most half full, and chains are looked up in one vectorised
pass, because a prompt asks for thousands of blocks at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 16
# Keys are hashes already; the multiplier spreads those of tests, and folds all of their bits.
_SPREAD = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_MIN_BUCKETS = 256


class Columns:
    """One row for each slot of a disk that was ever cut. All arrays have one length, a little ahead of
    what is used."""

    def __init__(self) -> None:
        self.n_rows = 0
        self.key = np.zeros((0, 2), np.uint64)
        self.checksum = np.zeros((0, 2), np.uint64)
        self.generation = np.zeros(0, np.uint64)
        self.used = np.zeros(0, np.int64)  # when it was last wanted, in ticks
        self.n_bytes = np.zeros(0, np.uint32)
        self.slab = np.zeros(0, np.uint32)
        self.parent = np.zeros(0, np.uint32)  # the row before it in its chain, + 1; 0: not known
        self.children = np.zeros(0, np.uint32)  # rows that have it as parent
        self.depth = np.zeros(0, np.uint16)  # blocks before it in its chain
        self.kind = np.zeros(0, np.uint16)  # of the policy
        self.tenant = np.zeros(0, np.uint16)  # a number of the quota's
        self.published = np.zeros(0, np.bool_)

    def grow(self, n_rows: int) -> int:
        """Use more rows; returns the first new one."""
        first, self.n_rows = self.n_rows, self.n_rows + n_rows
        if self.n_rows > len(self.slab):
            added = max(self.n_rows, len(self.slab) * 9 // 8) - len(self.slab)
            for name, old in self._arrays():
                setattr(self, name, np.concatenate([old, np.zeros((added, *old.shape[1:]), old.dtype)]))
        return first

    @property
    def n_bytes_of_memory(self) -> int:
        """Memory of the columns, in bytes."""
        return sum(int(column.nbytes) for _, column in self._arrays())

    def _arrays(self) -> list[tuple[str, np.ndarray]]:
        return [(name, value) for name, value in vars(self).items() if isinstance(value, np.ndarray)]


class DiskIndex:
    """Key to id. The caller keeps the columns and says what is in them."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._reset(_MIN_BUCKETS)

    def __len__(self) -> int:
        return self._n_keys

    @property
    def n_bytes_of_memory(self) -> int:
        """Memory of the table, in bytes."""
        return sys.getsizeof(self._buckets) + int(self._buckets.nbytes)

    def find(self, key: bytes) -> int:
        """The id of the key, -1 when it is not there."""
        bucket = self._bucket_of(key)
        return -1 if bucket < 0 else int(self._buckets[bucket]) - 2

    def find_many(self, keys: Sequence[bytes]) -> np.ndarray:
        """The ids of the keys, -1 where it is not there: i64, in their order."""
        wanted = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)
        found = np.full(len(wanted), -1, np.int64)
        left = np.arange(len(wanted))
        at = self._homes(wanted)
        while left.size:
            refs = self._buckets[at].astype(np.int64)
            full = refs > 1
            same = np.zeros(left.size, np.bool_)
            same[full] = (self._columns.key[refs[full] - 2] == wanted[left[full]]).all(axis=1)
            found[left[same]] = refs[same] - 2
            going_on = (refs != 0) & ~same
            left, at = left[going_on], (at[going_on] + 1) & self._mask
        return found

    def add(self, key: bytes, row: int) -> None:
        """The key is not there yet; its row in the columns has it."""
        if 2 * (self._n_filled + 1) > len(self._buckets):
            # The row is published already or not: either way it is added once, below.
            self.rebuild(np.setdiff1d(np.flatnonzero(self._columns.published), [row]))
        bucket = self._home(key)
        while self._buckets[bucket] > 1:
            bucket = (bucket + 1) & self._mask
        self._n_filled += int(self._buckets[bucket] == 0)
        self._n_keys += 1
        self._buckets[bucket] = row + 2

    def remove(self, key: bytes) -> None:
        """The key is there; its row still has it."""
        bucket = self._bucket_of(key)
        if bucket < 0:
            raise KeyError(key.hex())
        self._buckets[bucket] = 1
        self._n_keys -= 1

    def rebuild(self, rows: np.ndarray) -> None:
        """Forget all; then exactly these rows, whose keys differ, are there."""
        self._reset(max(_MIN_BUCKETS, 1 << (3 * len(rows)).bit_length()))
        left = rows.astype(np.int64)
        at = self._homes(self._columns.key[left])
        while left.size:
            empty = self._buckets[at] == 0
            self._buckets[at[empty]] = (left[empty] + 2).astype(np.uint32)  # of two, the last one stays
            lost = self._buckets[at] != left + 2
            left, at = left[lost], (at[lost] + 1) & self._mask
        self._n_keys = self._n_filled = len(rows)

    def _reset(self, n_buckets: int) -> None:
        self._buckets = np.zeros(n_buckets, np.uint32)
        self._mask = n_buckets - 1
        self._shift = 65 - n_buckets.bit_length()
        self._n_keys = self._n_filled = 0

    def _bucket_of(self, key: bytes) -> int:
        """Where the key is; -1 when it is not there."""
        buckets, keys, bucket = self._buckets, self._columns.key, self._home(key)
        while (ref := int(buckets[bucket])) != 0:
            if ref > 1 and keys[ref - 2].tobytes() == key:
                return bucket
            bucket = (bucket + 1) & self._mask
        return -1

    def _home(self, key: bytes) -> int:
        low, high = int.from_bytes(key[:8], sys.byteorder), int.from_bytes(key[8:], sys.byteorder)
        return (((low ^ high) * _SPREAD) & _MASK64) >> self._shift

    def _homes(self, keys: np.ndarray) -> np.ndarray:
        folded: np.ndarray = keys[:, 0] ^ keys[:, 1]
        return ((folded * np.uint64(_SPREAD)) >> np.uint64(self._shift)).astype(np.int64)

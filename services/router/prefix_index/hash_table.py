"""A hash table from eight bytes of a block's hash to a number. Pure.

A dict of hashes takes about 110 bytes per entry; this table takes 20. It has many small buckets of records,
and one call of `bytearray.find` searches a bucket. The table grows and shrinks by a few buckets at a time, so
no call moves millions of entries (Litwin, "Linear hashing: a new tool for file and table addressing", VLDB
1980).

Two hashes with the same first eight bytes are one entry. That does not happen by chance. A client that
computes such hashes makes only its own lookups wrong.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 8
_RECORD_BYTES = 16  # the key, and the number as little-endian u64
# Records in a bucket, on average: more take longer to search, fewer waste memory on objects.
_BUCKET_RECORDS = 32
_GROWN_TOGETHER = 16  # buckets split in one step, because each call of numpy has a fixed cost
_FEW = 4  # for at most this many keys a loop is faster than numpy
_SHRINK_BELOW = _BUCKET_RECORDS * 3 // 4

_number = int.from_bytes


def pack_keys(hashes: Sequence[bytes]) -> bytes:
    """The keys of hashes, concatenated."""
    return b"".join([block_hash[:KEY_BYTES] for block_hash in hashes])


def reversed_keys(keys: bytes) -> bytes:
    """Packed keys in reverse order."""
    return np.frombuffer(keys, dtype="<u8")[::-1].tobytes()


def count_common(a: bytes, at_a: int, b: bytes, at_b: int) -> int:
    """The number of equal keys from two positions on. The first pair is known to be equal."""
    most = min(len(a) - at_a, len(b) - at_b) // KEY_BYTES
    if most > 1 and a[at_a + KEY_BYTES : at_a + 2 * KEY_BYTES] != b[at_b + KEY_BYTES : at_b + 2 * KEY_BYTES]:
        return 1

    def is_more(n: int) -> bool:
        return a[at_a : at_a + n * KEY_BYTES] != b[at_b : at_b + n * KEY_BYTES]

    return most if not is_more(most) else bisect.bisect_left(range(most), True, key=is_more) - 1


def count_common_backwards(a: bytes, end_a: int, b: bytes, end_b: int) -> int:
    """The number of equal keys before two positions. The last pair is known to be equal."""
    most = min(end_a, end_b) // KEY_BYTES
    second_a, second_b = end_a - 2 * KEY_BYTES, end_b - 2 * KEY_BYTES
    if most > 1 and a[second_a : second_a + KEY_BYTES] != b[second_b : second_b + KEY_BYTES]:
        return 1

    def is_more(n: int) -> bool:
        return a[end_a - n * KEY_BYTES : end_a] != b[end_b - n * KEY_BYTES : end_b]

    return most if not is_more(most) else bisect.bisect_left(range(most), True, key=is_more) - 1


class HashTable:
    """Maps keys of KEY_BYTES bytes to numbers from 0 to 2^64 - 1."""

    def __init__(self) -> None:
        self._buckets = [bytearray()]
        self._doubled_from = 1  # a power of two, at most the number of buckets, of which it is over half
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def get(self, key: bytes) -> int:
        """The key's number; -1 for an unknown key."""
        index = _number(key[:4], "little") & (2 * self._doubled_from - 1)
        if index >= len(self._buckets):
            index &= self._doubled_from - 1
        bucket = self._buckets[index]
        at = bucket.find(key)
        if at % _RECORD_BYTES:  # not found (-1), or a match across records
            at = _find_on(bucket, key, at)
            if at < 0:
                return -1
        return _number(bucket[at + KEY_BYTES : at + _RECORD_BYTES], "little")

    def put_all(self, keys: bytes, first: int) -> list[tuple[int, int]]:
        """Map packed keys to consecutive numbers from `first` on.

        Returns the index and the previous number of each key that had one.
        """
        buckets, packed = self._buckets, _records(keys, first)
        most = self._n + len(keys) // KEY_BYTES
        while (missing := most // _BUCKET_RECORDS - len(buckets)) >= min(_GROWN_TOGETHER, len(buckets)):
            self._grow(missing)
        replaced: list[tuple[int, int]] = []
        at = -_RECORD_BYTES
        for i, index in enumerate(self._indices(keys)):
            at += _RECORD_BYTES
            bucket, key = buckets[index], packed[at : at + KEY_BYTES]
            found = bucket.find(key)
            if found % _RECORD_BYTES:
                found = _find_on(bucket, key, found)
            if found < 0:
                bucket += packed[at : at + _RECORD_BYTES]
            else:
                number = slice(found + KEY_BYTES, found + _RECORD_BYTES)
                replaced.append((i, _number(bucket[number], "little")))
                bucket[number] = packed[at + KEY_BYTES : at + _RECORD_BYTES]
        self._n += len(keys) // KEY_BYTES - len(replaced)
        return replaced

    def discard_all(self, keys: bytes, first: int) -> None:
        """Remove packed keys, each only if it has the number that counts from `first` on."""
        buckets = self._buckets
        for i, index in enumerate(self._indices(keys)):
            record = keys[KEY_BYTES * i : KEY_BYTES * (i + 1)] + (first + i).to_bytes(KEY_BYTES, "little")
            bucket = buckets[index]
            at = bucket.find(record)
            if at % _RECORD_BYTES:
                at = _find_on(bucket, record, at)
            if at >= 0:
                bucket[at : at + _RECORD_BYTES] = bucket[-_RECORD_BYTES:]
                del bucket[-_RECORD_BYTES:]
                self._n -= 1
        while len(buckets) > 1 and self._n < _SHRINK_BELOW * (len(buckets) - 1):
            self._shrink()

    def _indices(self, keys: bytes) -> list[int]:
        """The bucket of each key."""
        wide, narrow, n = 2 * self._doubled_from - 1, self._doubled_from - 1, len(self._buckets)
        return [
            index if (index := _number(keys[at : at + 4], "little") & wide) < n else index & narrow
            for at in range(0, len(keys), KEY_BYTES)
        ]

    def _grow(self, n_buckets: int) -> None:
        """Add so many buckets, or as many as are left to be split in this doubling."""
        buckets, half = self._buckets, self._doubled_from
        at = len(buckets) - half
        n = min(n_buckets, half - at)
        records = np.frombuffer(b"".join(buckets[at : at + n]), dtype="<u8").reshape(-1, 2)
        index = (records[:, 0] & np.uint64(2 * half - 1)).astype(np.intp)
        order = np.argsort(index, kind="stable")
        ends = np.searchsorted(index[order], [*range(at, at + n), *range(at + half, at + half + n)], "right")
        packed, begin = records[order].tobytes(), 0
        parts: list[bytearray] = []
        for end in (_RECORD_BYTES * ends).tolist():
            parts.append(bytearray(packed[begin:end]))
            begin = end
        buckets[at : at + n] = parts[:n]
        buckets += parts[n:]
        if len(buckets) == 2 * half:
            self._doubled_from *= 2

    def _shrink(self) -> None:
        if len(self._buckets) == self._doubled_from:
            self._doubled_from //= 2
        last = self._buckets.pop()
        self._buckets[len(self._buckets) - self._doubled_from] += last


def _records(keys: bytes, first: int) -> bytes:
    """Records of packed keys with consecutive numbers."""
    n = len(keys) // KEY_BYTES
    if n <= _FEW:
        few = b""
        for at in range(n):
            few += keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] + (first + at).to_bytes(KEY_BYTES, "little")
        return few
    records = np.empty((n, 2), dtype="<u8")
    records[:, 0] = np.frombuffer(keys, dtype="<u8")
    records[:, 1] = np.arange(first, first + n, dtype="<u8")
    return records.tobytes()


def _find_on(bucket: bytearray, wanted: bytes, at: int) -> int:
    """The offset of the first record that begins with `wanted`, from `at` on; -1 if there is none."""
    while at > 0 and at % _RECORD_BYTES:
        at = bucket.find(wanted, at + 1)
    return at

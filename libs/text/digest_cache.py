"""A cache of results by the digest of a JSON value, bounded in bytes. Pure.

Agents send the same tools with every turn, and validating and rendering ten of them takes most of a
millisecond.
"""

from __future__ import annotations

import hashlib
import marshal
import threading
from collections import OrderedDict
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def digest_of(value: Any) -> bytes | None:
    """A digest of a JSON value; None for another type or too deep nesting.

    Equal values in different form (1 and True, fields in another order) have different digests.
    """
    try:
        packed = marshal.dumps(value, 0)  # the fastest encoding of the standard library, only used here
    except ValueError:
        return None
    return hashlib.blake2b(packed, digest_size=16).digest()


class DigestCache(Generic[T]):
    """An LRU cache of values by digest, bounded in bytes. Any thread may use it."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[bytes, tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.n_bytes = 0  # the sum of the sizes that callers state

    def get(self, digest: bytes | None) -> T | None:
        """The cached value, or None."""
        if digest is None:
            return None
        with self._lock:
            kept = self._found.get(digest)
            if kept is None:
                return None
            self._found.move_to_end(digest)
            return kept[0]

    def keep(self, digest: bytes | None, value: T, *, n_bytes: int) -> None:
        """Add a value that `get` did not find, unless it is larger than the cache."""
        if digest is None or n_bytes > self._max_bytes:
            return
        with self._lock:
            if digest in self._found:
                return
            self._found[digest] = (value, n_bytes)
            self.n_bytes += n_bytes
            while self.n_bytes > self._max_bytes:
                _, (_, freed) = self._found.popitem(last=False)
                self.n_bytes -= freed

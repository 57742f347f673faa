"""What was made of a value before, where the same one comes again and again. Pure.

Agents send the same tools with every turn: to check ten of them and write them down takes most of a
millisecond.
"""

from __future__ import annotations

import hashlib
import marshal
from collections import OrderedDict
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def digest_of(value: Any) -> bytes | None:
    """A name of a value of JSON; None for what is none, or is nested too deeply. Values that are equal and
    yet written differently (1 and True, fields in another order) have different ones."""
    try:
        packed = marshal.dumps(value, 0)  # of all that there is it takes least; it never leaves the process
    except ValueError:
        return None
    return hashlib.blake2b(packed, digest_size=16).digest()


class Remembered(Generic[T]):
    """Values by digest, the one used least lately forgotten first. Not thread-safe."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[bytes, tuple[T, int]] = OrderedDict()
        self.n_bytes = 0  # as told by who keeps them

    def get(self, digest: bytes | None) -> T | None:
        """What is kept of it."""
        kept = self._found.get(digest) if digest is not None else None
        if digest is None or kept is None:
            return None
        self._found.move_to_end(digest)
        return kept[0]

    def keep(self, digest: bytes | None, value: T, *, n_bytes: int) -> None:
        """Keep what was not found, if there is room for it at all."""
        if digest is None or n_bytes > self._max_bytes or digest in self._found:
            return
        self._found[digest] = (value, n_bytes)
        self.n_bytes += n_bytes
        while self.n_bytes > self._max_bytes:
            _, (_, freed) = self._found.popitem(last=False)
            self.n_bytes -= freed

"""Fields that tell whether they are whole: magic word, version, values, and a hash over all of it. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any


class ChecksummedRecord:
    """One kind of them; both ends of it. Little-endian."""

    def __init__(
        self, layout: str, *, magic: bytes, version: int, digest: Callable[[bytes], bytes], seal_bytes: int
    ) -> None:
        """`layout`: of the fields, as for `struct`; `digest` makes the seal of `seal_bytes`."""
        self._struct = struct.Struct(f"<{len(magic)}sII{layout}")
        self._magic = magic
        self._version = version
        self._digest = digest
        self.fields_bytes = self._struct.size
        self.n_bytes = self.fields_bytes + seal_bytes

    def fields(self, *values: Any) -> bytes:
        """What is sealed: `fields_bytes` of it."""
        return self._struct.pack(self._magic, self._version, 0, *values)

    def pack(self, *values: Any) -> bytes:
        """Fields and seal: `n_bytes` of them."""
        fixed = self.fields(*values)
        return fixed + self._digest(fixed)

    def unpack(self, raw: bytes | memoryview) -> tuple[Any, ...] | None:
        """The values of what begins with `n_bytes` that `pack` gave; None for anything else."""
        fixed, seal = bytes(raw[: self.fields_bytes]), bytes(raw[self.fields_bytes : self.n_bytes])
        if self.fields_bytes + len(seal) != self.n_bytes or self._digest(fixed) != seal:
            return None
        magic, version, _, *values = self._struct.unpack(fixed)
        if magic != self._magic or version != self._version:
            return None
        return tuple(values)

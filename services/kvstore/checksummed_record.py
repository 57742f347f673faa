"""Self-verifying records: magic word, version, values, and a seal (hash) over all of it. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any


class ChecksummedRecord:
    """One kind of record, packed and unpacked. Little-endian."""

    def __init__(
        self, layout: str, *, magic: bytes, version: int, digest: Callable[[bytes], bytes], seal_bytes: int
    ) -> None:
        """`layout`: the fields' `struct` format. `digest` computes the seal of `seal_bytes`."""
        self._struct = struct.Struct(f"<{len(magic)}sII{layout}")
        self._magic = magic
        self._version = version
        self._digest = digest
        self.fields_bytes = self._struct.size
        self.n_bytes = self.fields_bytes + seal_bytes

    def fields(self, *values: Any) -> bytes:
        """The sealed part: `fields_bytes` bytes."""
        return self._struct.pack(self._magic, self._version, 0, *values)

    def pack(self, *values: Any) -> bytes:
        """The record: fields and seal, `n_bytes` bytes."""
        fixed = self.fields(*values)
        return fixed + self._digest(fixed)

    def unpack(self, raw: bytes | memoryview) -> tuple[Any, ...] | None:
        """The values of a packed record at the start of `raw`; None for anything else."""
        fixed, seal = bytes(raw[: self.fields_bytes]), bytes(raw[self.fields_bytes : self.n_bytes])
        if self.fields_bytes + len(seal) != self.n_bytes or self._digest(fixed) != seal:
            return None
        magic, version, _, *values = self._struct.unpack(fixed)
        if magic != self._magic or version != self._version:
            return None
        return tuple(values)

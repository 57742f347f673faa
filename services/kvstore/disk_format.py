"""The bytes on disk: a segment's superblock and a slot's header. Pure.

    segment file: superblock (4 KiB), then slots of header (4 KiB) + payload (page-rounded)
    header: magic, version, key, payload length, generation, payload checksum   (the bound part)
            digest  = xxh3-128(bound part, payload): ties key, generation and length to the bytes
            own sum = xxh3-64(bound part, digest): tells a torn header from a written one
    Little-endian; checksums big-endian as everywhere.

The generation rises with every write of a store. The index remembers it, so that an old header that
comes back (a lost write) is told from the one that was written.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

HEADER_BYTES = 4096
VERSION = 1
_SUPERBLOCK = struct.Struct("<8sIIQQQ")
_SUPERBLOCK_MAGIC = b"slipkvsg"
_BOUND = struct.Struct("<8sII16sQQ16s")
_HEADER_MAGIC = b"slipkvbl"
_DIGEST_BYTES = 16
_SUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Superblock:
    """How a segment file is cut. `number` is also in the file's name."""

    number: int
    segment_bytes: int
    slot_bytes: int

    def pack(self) -> bytes:
        """HEADER_BYTES bytes."""
        fixed = _SUPERBLOCK.pack(
            _SUPERBLOCK_MAGIC, VERSION, 0, self.number, self.segment_bytes, self.slot_bytes
        )
        return (fixed + xxhash.xxh3_64_digest(fixed)).ljust(HEADER_BYTES, b"\0")


def unpack_superblock(raw: bytes) -> Superblock | None:
    """None for anything that `pack` of this version did not write."""
    fixed, found_sum = raw[: _SUPERBLOCK.size], raw[_SUPERBLOCK.size : _SUPERBLOCK.size + _SUM_BYTES]
    if len(found_sum) != _SUM_BYTES or xxhash.xxh3_64_digest(fixed) != found_sum:
        return None
    magic, version, _, number, segment_bytes, slot_bytes = _SUPERBLOCK.unpack(fixed)
    if magic != _SUPERBLOCK_MAGIC or version != VERSION:
        return None
    return Superblock(number, segment_bytes, slot_bytes)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """`checksum` is xxh3-128 of the payload, what readers verify after the transfer."""

    key: bytes
    n_bytes: int
    generation: int
    checksum: bytes
    digest: bytes = b""

    def bound_part(self) -> bytes:
        """The part that the digest ties to the payload."""
        return _BOUND.pack(_HEADER_MAGIC, VERSION, 0, self.key, self.n_bytes, self.generation, self.checksum)

    def digest_over(self, payload: memoryview) -> bytes:
        """xxh3-128 of the bound part and the payload, whose length is `n_bytes`."""
        state = xxhash.xxh3_128(self.bound_part())
        state.update(payload)
        return state.digest()

    def pack(self, payload: memoryview) -> bytes:
        """HEADER_BYTES bytes for this payload."""
        fixed = self.bound_part() + self.digest_over(payload)
        return (fixed + xxhash.xxh3_64_digest(fixed)).ljust(HEADER_BYTES, b"\0")


def unpack_header(raw: bytes | memoryview) -> BlockHeader | None:
    """None for anything that `pack` of this version did not write whole. Says nothing of the payload."""
    end = _BOUND.size + _DIGEST_BYTES
    fixed, found_sum = bytes(raw[:end]), bytes(raw[end : end + _SUM_BYTES])
    if len(found_sum) != _SUM_BYTES or xxhash.xxh3_64_digest(fixed) != found_sum:
        return None
    magic, version, _, key, n_bytes, generation, checksum = _BOUND.unpack(fixed[: _BOUND.size])
    if magic != _HEADER_MAGIC or version != VERSION:
        return None
    return BlockHeader(key, n_bytes, generation, checksum, fixed[_BOUND.size :])

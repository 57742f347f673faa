"""The bytes on disk: a segment's superblock and its table of headers. Pure.

    segment file: superblock (4 KiB) | one header page (4 KiB) for each slot | the slots' payloads
        header: magic, version, key, payload length, generation, xxh3-128 of the payload   (the sealed fields)
            seal = xxh3-128 over these fields: binds the key, the length and the generation to the bytes
    Little-endian; checksums big-endian as everywhere.

The seal covers the key and the payload's hash, so that one pass over a payload serves the wire, the disk
and the scrub. Each header has its own page, so a torn write damages one header only. The headers are
adjacent, so that a start reads them in large pieces, and payloads of a chain are neighbours.

The generation rises with every write of a disk. The superblock records the generation at which the segment
was cut: older headers remain from an earlier cut and are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from services.kvstore.checksummed_record import ChecksummedRecord

HEADER_BYTES = 4096
VERSION = 2
_HEADER_MAGIC = b"slipkvbl"
_SUPERBLOCK = ChecksummedRecord(
    "QQQQ", magic=b"slipkvsg", version=VERSION, digest=xxhash.xxh3_64_digest, seal_bytes=8
)
_HEADER = ChecksummedRecord(
    "16sQQ16s", magic=_HEADER_MAGIC, version=VERSION, digest=xxhash.xxh3_128_digest, seal_bytes=16
)
SEALED_BYTES = _HEADER.fields_bytes
_HEADER_PAGE = np.dtype(
    {
        "names": ["magic", "version", "key", "n_bytes", "generation", "checksum"],
        "formats": ["<u8", "<u4", ("u8", 2), "<u8", "<u8", ("u8", 2)],
        "offsets": [0, 8, 16, 32, 40, 48],
        "itemsize": HEADER_BYTES,
    }
)
_MAGIC_NUMBER = int.from_bytes(_HEADER_MAGIC, "little")


@dataclass(frozen=True, slots=True)
class Superblock:
    """Layout of a segment file.

    `number` is also in the file's name. Generations up to `cut_generation` belong to an earlier cut.
    """

    number: int
    segment_bytes: int
    slot_bytes: int
    cut_generation: int = 0

    @property
    def n_slots(self) -> int:
        """Number of slots of the segment."""
        return slots_in(self.segment_bytes, self.slot_bytes)

    def header_offset(self, index: int) -> int:
        """Offset of slot `index`'s header page."""
        return HEADER_BYTES * (1 + index)

    def payload_offset(self, index: int) -> int:
        """Offset of slot `index`'s payload."""
        return HEADER_BYTES * (1 + self.n_slots) + index * self.slot_bytes

    def pack(self) -> bytes:
        """The superblock's page: HEADER_BYTES bytes."""
        sealed = _SUPERBLOCK.pack(self.number, self.segment_bytes, self.slot_bytes, self.cut_generation)
        return sealed.ljust(HEADER_BYTES, b"\0")


def slots_in(segment_bytes: int, slot_bytes: int) -> int:
    """Number of slots of that payload size that fit a segment with their headers."""
    return segment_bytes // (slot_bytes + HEADER_BYTES)


def unpack_superblock(raw: bytes | memoryview) -> Superblock | None:
    """The superblock of a page; None unless `pack` of this version wrote it."""
    fields = _SUPERBLOCK.unpack(raw)
    return None if fields is None else Superblock(*fields)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """A block's header. Readers verify `checksum`, xxh3-128 of the payload, after the transfer."""

    key: bytes
    n_bytes: int
    generation: int
    checksum: bytes

    def fields(self) -> bytes:
        """The sealed fields: SEALED_BYTES bytes."""
        return _HEADER.fields(self.key, self.n_bytes, self.generation, self.checksum)

    def sealed(self) -> bytes:
        """The fields and their seal; the rest of the page is zero."""
        return _HEADER.pack(self.key, self.n_bytes, self.generation, self.checksum)


def unpack_header(raw: bytes | memoryview) -> BlockHeader | None:
    """The header of a page; None unless `sealed` of this version wrote it. Does not verify the payload."""
    fields = _HEADER.unpack(raw)
    return None if fields is None else BlockHeader(*fields)


@dataclass(frozen=True, slots=True)
class FoundHeaders:
    """Whole headers of one segment, by slot: arrays of one length."""

    index: np.ndarray  # u32, ascending
    key: np.ndarray  # [n, 2] u64
    n_bytes: np.ndarray  # u64
    generation: np.ndarray  # u64
    checksum: np.ndarray  # [n, 2] u64

    @classmethod
    def joined(cls, parts: list[FoundHeaders]) -> FoundHeaders:
        """The parts, concatenated."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.index for part in parts]),
            np.concatenate([part.key for part in parts]),
            np.concatenate([part.n_bytes for part in parts]),
            np.concatenate([part.generation for part in parts]),
            np.concatenate([part.checksum for part in parts]),
        )


def find_headers(pages: memoryview, superblock: Superblock, first: int = 0) -> FoundHeaders:
    """The whole headers of this cut among `pages`, which are those of the slots from `first` on."""
    rows = np.frombuffer(pages, dtype=_HEADER_PAGE)  # views of a few bytes of each page
    n_bytes = rows["n_bytes"]
    maybe = (
        (rows["magic"] == _MAGIC_NUMBER)
        & (rows["version"] == VERSION)
        & (rows["generation"] > superblock.cut_generation)
        & (n_bytes <= superblock.slot_bytes)
        & (n_bytes + HEADER_BYTES > superblock.slot_bytes)
    )
    digest, fixed, sealed = xxhash.xxh3_128_digest, _HEADER.fields_bytes, _HEADER.n_bytes
    whole = [
        row
        for row in np.flatnonzero(maybe).tolist()
        if digest(pages[row * HEADER_BYTES : row * HEADER_BYTES + fixed])
        == pages[row * HEADER_BYTES + fixed : row * HEADER_BYTES + sealed]
    ]
    kept = rows[whole]
    return FoundHeaders(
        np.array(whole, dtype=np.uint32) + np.uint32(first),
        kept["key"].copy(),
        kept["n_bytes"].copy(),
        kept["generation"].copy(),
        kept["checksum"].copy(),
    )

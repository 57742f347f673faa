"""The bytes on disk: a segment's superblock and its table of headers. Pure.

    segment file: superblock (4 KiB) | one header page (4 KiB) for each slot | the slots' payloads
    header: magic, version, key, payload length, generation, xxh3-128 of the payload   (what is sealed)
            seal = xxh3-128 over all of it: ties the key, the length and the generation to the bytes
    Little-endian; checksums big-endian as everywhere.

The seal is a hash over the key and the payload's hash, so that one pass over a payload serves the wire,
the disk and the scrub. Each header has a page of its own: no write of one can tear another. The headers
lie side by side, so that a start reads them in large pieces, and payloads of a chain are neighbours.

The generation rises with every write of a disk. The superblock has the generation at which the segment
was cut: what an earlier cut left behind is older and is not believed.
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
    """How a segment file is cut. `number` is also in the file's name; blocks of generations up to
    `cut_generation` belong to an earlier cut."""

    number: int
    segment_bytes: int
    slot_bytes: int
    cut_generation: int = 0

    @property
    def n_slots(self) -> int:
        """Slots of the segment."""
        return slots_in(self.segment_bytes, self.slot_bytes)

    def header_offset(self, index: int) -> int:
        """Where slot `index` has its header page."""
        return HEADER_BYTES * (1 + index)

    def payload_offset(self, index: int) -> int:
        """Where slot `index` has its payload."""
        return HEADER_BYTES * (1 + self.n_slots) + index * self.slot_bytes

    def pack(self) -> bytes:
        """HEADER_BYTES bytes."""
        sealed = _SUPERBLOCK.pack(self.number, self.segment_bytes, self.slot_bytes, self.cut_generation)
        return sealed.ljust(HEADER_BYTES, b"\0")


def slots_in(segment_bytes: int, slot_bytes: int) -> int:
    """How many slots of that payload size fit a segment beside their headers."""
    return segment_bytes // (slot_bytes + HEADER_BYTES)


def unpack_superblock(raw: bytes | memoryview) -> Superblock | None:
    """None for anything that `pack` of this version did not write."""
    fields = _SUPERBLOCK.unpack(raw)
    return None if fields is None else Superblock(*fields)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """`checksum` is xxh3-128 of the payload, what readers verify after the transfer."""

    key: bytes
    n_bytes: int
    generation: int
    checksum: bytes

    def fields(self) -> bytes:
        """What is sealed: SEALED_BYTES bytes."""
        return _HEADER.fields(self.key, self.n_bytes, self.generation, self.checksum)

    def sealed(self) -> bytes:
        """The header and its seal, the rest of the page is zero."""
        return _HEADER.pack(self.key, self.n_bytes, self.generation, self.checksum)


def unpack_header(raw: bytes | memoryview) -> BlockHeader | None:
    """None for anything that `sealed` of this version did not give. Says nothing of the payload."""
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
        """The parts one after the other."""
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
    """The whole headers among `pages`, those of the slots from `first` on, that belong to this cut."""
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

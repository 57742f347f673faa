"""A block as one value of the pool: our header, then the payload. Pure.

    value:  header (128 bytes) | payload
    header: magic, version, key, payload length, xxh3-128 of the payload     (what is sealed)
            seal = xxh3-128 over all of it: ties the key and the length to the bytes
            hint = the key before it in its chain, the first 8 bytes of xxh3-128 of the name of the segment
            of who put it, xxh3-64 over the seal and these; zeros where nothing is known. Older readers do
            not look at it, older writers leave zeros
    Little-endian; checksums big-endian as everywhere.

The key is the block's hash, which is salted with the tenant: one tenant's value does not open under
another's key. The pool's own engine returns flipped bits, stale memory and foreign values without an
error, so a value counts only when `open_value` takes it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from services.kvstore.checksummed_record import ChecksummedRecord

HEADER_BYTES = 128
VERSION = 1
_HEADER = ChecksummedRecord(
    "16sQ16s", magic=b"slipkvpl", version=VERSION, digest=xxhash.xxh3_128_digest, seal_bytes=16
)
_HINT = struct.Struct("<16s8s8s")
KEY_BYTES = 16
# Distinguishes our values from whatever else a pool holds, and values of another version.
NAME_PREFIX = f"slipstream{VERSION}-"


def name_of(key: bytes) -> str:
    """The name under which the pool holds a block."""
    return NAME_PREFIX + key.hex()


def key_of(name: str) -> bytes | None:
    """The key of a value of ours by its name, None for anything else."""
    text = name.removeprefix(NAME_PREFIX)
    try:
        return bytes.fromhex(text) if text != name and len(text) == 2 * KEY_BYTES else None
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Hint:
    """Who may look after a value: the key before it in its chain, and the tag of the node that put it."""

    before: bytes
    putter: bytes


def tag_of(segment: str) -> bytes:
    """A node of the pool by the name of its segment; another one after each start."""
    return xxhash.xxh3_128_digest(segment.encode())[:8]


def sealed_header(key: bytes, n_bytes: int, checksum: bytes, hint: Hint | None = None) -> bytes:
    """HEADER_BYTES bytes for a payload of `n_bytes` whose xxh3-128 is `checksum`."""
    sealed = _HEADER.pack(key, n_bytes, checksum)
    if hint is not None:
        said = hint.before + hint.putter
        sealed += said + _check_of(sealed, said)
    return sealed.ljust(HEADER_BYTES, b"\0")


def _check_of(sealed: bytes | memoryview, said: bytes) -> bytes:
    """Ties a hint to the seal before it."""
    return xxhash.xxh3_64_digest(bytes(sealed[_HEADER.fields_bytes :]) + said)


def open_hint(header: memoryview, key: bytes) -> Hint | None:
    """What the header of a value under this key says beside its payload; None when it says nothing, or is
    not whole."""
    fields = _HEADER.unpack(header)
    said = bytes(header[_HEADER.n_bytes : _HEADER.n_bytes + _HINT.size])
    if fields is None or fields[0] != key or len(said) != _HINT.size:
        return None
    before, putter, check = _HINT.unpack(said)
    whole = any(before) and _check_of(header[: _HEADER.n_bytes], before + putter) == check
    return Hint(before, putter) if whole else None


def open_header(value: memoryview, key: bytes) -> bytes | None:
    """The payload's checksum when the header is whole and of this key and length, else None. Says
    nothing of the payload."""
    fields = _HEADER.unpack(value)
    if fields is None:
        return None
    found_key, n_bytes, checksum = fields
    return bytes(checksum) if found_key == key and n_bytes == len(value) - HEADER_BYTES else None


def open_value(value: memoryview, key: bytes) -> bytes | None:
    """The payload's checksum when header and payload are what was put under this key, else None."""
    checksum = open_header(value, key)
    if checksum is None or xxhash.xxh3_128_digest(value[HEADER_BYTES:]) != checksum:
        return None
    return checksum

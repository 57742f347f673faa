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

HEADER_BYTES = 128
VERSION = 1
_SEALED = struct.Struct("<8sII16sQ16s")
_MAGIC = b"slipkvpl"
_SEAL_BYTES = 16
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
    fixed = _SEALED.pack(_MAGIC, VERSION, 0, key, n_bytes, checksum)
    sealed = fixed + xxhash.xxh3_128_digest(fixed)
    if hint is not None:
        said = hint.before + hint.putter
        sealed += said + xxhash.xxh3_64_digest(sealed[-_SEAL_BYTES:] + said)
    return sealed.ljust(HEADER_BYTES, b"\0")


def open_hint(header: memoryview, key: bytes) -> Hint | None:
    """What the header of a value under this key says beside its payload; None when it says nothing, or is
    not whole."""
    end = _SEALED.size
    fixed, seal = bytes(header[:end]), bytes(header[end : end + _SEAL_BYTES])
    said = bytes(header[end + _SEAL_BYTES : end + _SEAL_BYTES + _HINT.size])
    if len(said) != _HINT.size or xxhash.xxh3_128_digest(fixed) != seal:
        return None
    magic, version, _, found_key, _, _ = _SEALED.unpack(fixed)
    before, putter, check = _HINT.unpack(said)
    if magic != _MAGIC or version != VERSION or found_key != key or not any(before):
        return None
    return Hint(before, putter) if xxhash.xxh3_64_digest(seal + before + putter) == check else None


def open_header(value: memoryview, key: bytes) -> bytes | None:
    """The payload's checksum when the header is whole and of this key and length, else None. Says
    nothing of the payload."""
    end = _SEALED.size
    fixed, seal = bytes(value[:end]), bytes(value[end : end + _SEAL_BYTES])
    if len(seal) != _SEAL_BYTES or xxhash.xxh3_128_digest(fixed) != seal:
        return None
    magic, version, _, found_key, n_bytes, checksum = _SEALED.unpack(fixed)
    if magic != _MAGIC or version != VERSION or found_key != key or n_bytes != len(value) - HEADER_BYTES:
        return None
    return bytes(checksum)


def open_value(value: memoryview, key: bytes) -> bytes | None:
    """The payload's checksum when header and payload are what was put under this key, else None."""
    checksum = open_header(value, key)
    if checksum is None or xxhash.xxh3_128_digest(value[HEADER_BYTES:]) != checksum:
        return None
    return checksum

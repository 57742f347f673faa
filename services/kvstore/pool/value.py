"""A block as one value of the pool: our header, then the payload. Pure.

    value:  header (128 bytes) | payload
    header: magic, version, key, payload length, xxh3-128 of the payload     (what is sealed)
            seal = xxh3-128 over all of it: ties the key and the length to the bytes; zeros follow
    Little-endian; checksums big-endian as everywhere.

The key is the block's hash, which is salted with the tenant: one tenant's value does not open under
another's key. The pool's own engine returns flipped bits, stale memory and foreign values without an
error, so a value counts only when `open_value` takes it.
"""

from __future__ import annotations

import struct

import xxhash

HEADER_BYTES = 128
VERSION = 1
_SEALED = struct.Struct("<8sII16sQ16s")
_MAGIC = b"slipkvpl"
_SEAL_BYTES = 16
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


def sealed_header(key: bytes, n_bytes: int, checksum: bytes) -> bytes:
    """HEADER_BYTES bytes for a payload of `n_bytes` whose xxh3-128 is `checksum`."""
    fixed = _SEALED.pack(_MAGIC, VERSION, 0, key, n_bytes, checksum)
    return (fixed + xxhash.xxh3_128_digest(fixed)).ljust(HEADER_BYTES, b"\0")


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

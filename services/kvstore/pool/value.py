"""Layout of a block as a value in the pool: header, then payload. Pure.

    value:  header (128 bytes) | payload
    header: magic, version, key, payload length, plain xxh3-128 of the payload,
            proof: BLAKE2b-128 under the cluster's key of key, length, keyed checksum    (the sealed fields)
            seal = xxh3-128 over these fields: binds the key and the length to the bytes
            hint = the preceding key in the chain, the first 8 bytes of xxh3-128 of the putter's segment
            name, xxh3-64 over the seal and both; zeros where they are not known
    Little-endian; checksums big-endian as everywhere.

The key is the block's hash, which is salted with the tenant: a tenant's value does not verify under
another's key. The pool's engine may return flipped bits, stale memory and foreign values without an
error, so the agent keeps a value only if `verify_value` accepts it. A process that reaches Mooncake's ports
can also write whole values, so the node uses a value only if its proof is `proof_of` the copied payload.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from libs.common.checksum import UNKEYED, KvChecksum
from services.kvstore.checksummed_record import ChecksummedRecord

HEADER_BYTES = 128
VERSION = 2
_HEADER = ChecksummedRecord(
    "16sQ16s16s", magic=b"slipkvpl", version=VERSION, digest=xxhash.xxh3_128_digest, seal_bytes=16
)
_HINT = struct.Struct("<16s8s8s")
KEY_BYTES = 16
# Separates these values from other users of the pool, and from values of another version.
NAME_PREFIX = f"slipstream{VERSION}-"


def name_of(key: bytes) -> str:
    """The name of a block in the pool."""
    return NAME_PREFIX + key.hex()


def key_of(name: str) -> bytes | None:
    """The key of a block by its name in the pool; None for any other name."""
    text = name.removeprefix(NAME_PREFIX)
    try:
        return bytes.fromhex(text) if text != name and len(text) == 2 * KEY_BYTES else None
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class ValueOrigin:
    """Origin of a value: the preceding key in its chain, and the tag of the node that put it."""

    before: bytes
    putter: bytes


def tag_of(segment: str) -> bytes:
    """The tag of a node: a digest of its segment's name, which differs after each start."""
    return xxhash.xxh3_128_digest(segment.encode())[:8]


def proof_of(key: bytes, n_bytes: int, checksum: bytes, function: KvChecksum = UNKEYED) -> bytes:
    """The proof that a process with the cluster's key put a payload, whose `checksum` is `function`'s."""
    return function.seal(_HEADER.fields(key, n_bytes, bytes(16), bytes(16)), checksum)


def pack_header(
    key: bytes, n_bytes: int, checksum: bytes, hint: ValueOrigin | None = None, *, proof: bytes | None = None
) -> bytes:
    """The HEADER_BYTES of a payload of `n_bytes` whose plain xxh3-128 is `checksum`.

    `proof`: None means that of a cluster without a secret.
    """
    sealed = _HEADER.pack(key, n_bytes, checksum, proof or proof_of(key, n_bytes, checksum))
    if hint is not None:
        said = hint.before + hint.putter
        sealed += said + _check_of(sealed, said)
    return sealed.ljust(HEADER_BYTES, b"\0")


def _check_of(sealed: bytes | memoryview, said: bytes) -> bytes:
    """The check that binds a hint to the seal before it."""
    return xxhash.xxh3_64_digest(bytes(sealed[_HEADER.fields_bytes :]) + said)


def read_hint(header: memoryview, key: bytes) -> ValueOrigin | None:
    """The hint in a whole header of this key; None if there is none or it is damaged."""
    fields = _HEADER.unpack(header)
    said = bytes(header[_HEADER.n_bytes : _HEADER.n_bytes + _HINT.size])
    if fields is None or fields[0] != key or len(said) != _HINT.size:
        return None
    before, putter, check = _HINT.unpack(said)
    whole = any(before) and _check_of(header[: _HEADER.n_bytes], before + putter) == check
    return ValueOrigin(before, putter) if whole else None


def header_checksum(value: memoryview, key: bytes) -> bytes | None:
    """The payload's checksum if the header is whole and matches key and length, else None.

    Does not verify the payload.
    """
    fields = _fields(value, key)
    return None if fields is None else fields[0]


def header_proof(value: memoryview, key: bytes) -> bytes | None:
    """The proof in a header that is whole and matches key and length, else None."""
    fields = _fields(value, key)
    return None if fields is None else fields[1]


def _fields(value: memoryview, key: bytes) -> tuple[bytes, bytes] | None:
    fields = _HEADER.unpack(value)
    if fields is None or fields[0] != key or fields[1] != len(value) - HEADER_BYTES:
        return None
    return bytes(fields[2]), bytes(fields[3])


def verify_value(value: memoryview, key: bytes) -> bytes | None:
    """The payload's checksum if header and payload are whole and were put under this key, else None."""
    checksum = header_checksum(value, key)
    if checksum is None or xxhash.xxh3_128_digest(value[HEADER_BYTES:]) != checksum:
        return None
    return checksum

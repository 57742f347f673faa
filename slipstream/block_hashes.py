"""Hashes of KV blocks as messages carry them: 16 bytes each, one after the other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

HASH_BYTES = 16


def pack_hashes(hashes: Sequence[bytes]) -> bytes:
    """Hashes as they travel: 16 bytes each, concatenated."""
    return b"".join(hashes)


def unpack_hashes(packed: bytes) -> list[bytes]:
    """Inverse of `pack_hashes`. Raises ValueError when the length is no multiple of 16."""
    if len(packed) % HASH_BYTES:
        raise ValueError(f"packed hashes have {len(packed)} bytes, no multiple of {HASH_BYTES}")
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]

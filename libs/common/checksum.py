"""xxh3-128 of memory by address: the checksum of every KV block, on the wire and on disk.

16 bytes, big-endian (xxHash's canonical form). It detects damage, but no deliberate forgery.
"""

from __future__ import annotations

import ctypes

import xxhash

CHECKSUM_BYTES = 16


def memory_at(address: int, n_bytes: int) -> memoryview:
    """A view of raw memory. The caller keeps the memory alive while it uses the view."""
    return memoryview((ctypes.c_char * n_bytes).from_address(address)).cast("B")


def checksum_at(address: int, n_bytes: int) -> bytes:
    """xxh3-128 of `n_bytes` at `address`. The memory must be mapped and unchanging."""
    return xxhash.xxh3_128_digest(memory_at(address, n_bytes))


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of `data`."""
    return xxhash.xxh3_128_digest(data)

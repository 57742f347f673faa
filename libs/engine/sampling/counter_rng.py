"""The sampler's randomness: one uniform number for each (seed, output token index). Pure.

A counter and no state: the number does not depend on the batch, on drafts, on the worker, or on how
often the token was computed, so a resumed or re-verified sequence draws the same tokens.
"""

from __future__ import annotations

import hashlib
import struct

_MANTISSA_BITS = 53


def uniform(seed: int, index: int) -> float:
    """In [0, 1), 53 random bits. `seed` is taken modulo 2^64."""
    counter = struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, index)
    digest = hashlib.blake2b(counter, digest_size=8, person=b"slipstream-rng").digest()
    bits: int = int.from_bytes(digest, "little") >> (64 - _MANTISSA_BITS)
    return bits * 2.0**-_MANTISSA_BITS

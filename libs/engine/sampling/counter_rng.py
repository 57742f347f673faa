"""The sampler's randomness: one uniform number for each (seed, output token index). Pure.

The generator has no state: a number does not depend on the batch, the drafts, the worker, or how often the
token was computed. So a resumed or re-verified sequence draws the same tokens.
"""

from __future__ import annotations

import hashlib
import struct

_MANTISSA_BITS = 53


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits. `seed` is taken modulo 2^64."""
    counter = struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, index)
    digest = hashlib.blake2b(counter, digest_size=8, person=b"slipstream-rng").digest()
    bits: int = int.from_bytes(digest, "little") >> (64 - _MANTISSA_BITS)
    return bits * 2.0**-_MANTISSA_BITS

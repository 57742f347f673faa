"""Identity of KV blocks: a keyed chain hash over the prompt's tokens.

    h_i = BLAKE2b-128(key = tenant salt, h_{i-1} || tokens_i as little-endian u32),   h_{-1} = root

`root` is the 16-byte digest of the model fingerprint, so blocks of different models, layouts or
dtypes never meet; `salt` is derived by the server from the authenticated tenant, so blocks of
different tenants never meet. Specification with test vectors: docs/block-hash.md. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HASH_BYTES = 16
MAX_SALT_BYTES = 64

TokenArray = npt.NDArray[np.uint32]


def as_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> TokenArray:
    """Tokens as a contiguous little-endian u32 array (the form they are hashed and sent in)."""
    return np.ascontiguousarray(tokens, dtype="<u4")


def tenant_salt(tenant: str) -> bytes:
    """The 32-byte salt of a tenant. The tenant is what the server authenticated, never client input."""
    return hashlib.blake2b(tenant.encode(), digest_size=32, person=b"slipstream-salt").digest()


def chain_hashes(
    tokens: Sequence[int] | npt.NDArray[np.integer], *, root: bytes, salt: bytes, block_tokens: int
) -> list[bytes]:
    """Hashes of all full blocks of `tokens`, 16 bytes each; a tail shorter than a block has none."""
    chain = HashChain(root=root, salt=salt, block_tokens=block_tokens)
    return chain.extend(tokens)


class HashChain:
    """The chain hash of a growing sequence; costs only the tokens that are new."""

    def __init__(self, *, root: bytes, salt: bytes, block_tokens: int) -> None:
        if len(root) != HASH_BYTES:
            raise ValueError(f"root must have {HASH_BYTES} bytes, not {len(root)}")
        if len(salt) > MAX_SALT_BYTES:
            raise ValueError(f"salt must have at most {MAX_SALT_BYTES} bytes, not {len(salt)}")
        if block_tokens < 1:
            raise ValueError("block_tokens must be positive")
        self._salt = salt
        self._block_tokens = block_tokens
        self._last = root
        self._tail = np.empty(0, dtype="<u4")
        self.hashes: list[bytes] = []

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> list[bytes]:
        """Append tokens; returns the hashes of the blocks that became full."""
        pending = np.concatenate([self._tail, as_tokens(tokens)])
        full = len(pending) // self._block_tokens
        fresh: list[bytes] = []
        for block in pending[: full * self._block_tokens].reshape(full, self._block_tokens):
            digest = hashlib.blake2b(self._last + block.tobytes(), key=self._salt, digest_size=HASH_BYTES)
            self._last = digest.digest()
            fresh.append(self._last)
        self._tail = pending[full * self._block_tokens :]
        self.hashes.extend(fresh)
        return fresh


def pack_hashes(hashes: Sequence[bytes]) -> bytes:
    """Hashes as they travel: 16 bytes each, concatenated."""
    return b"".join(hashes)


def unpack_hashes(packed: bytes) -> list[bytes]:
    """Inverse of `pack_hashes`. Raises ValueError when the length is no multiple of 16."""
    if len(packed) % HASH_BYTES:
        raise ValueError(f"packed hashes have {len(packed)} bytes, no multiple of {HASH_BYTES}")
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]

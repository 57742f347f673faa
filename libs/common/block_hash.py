"""The identity of KV blocks: a keyed chain hash over the prompt's tokens. Pure.

    h_i = BLAKE2b-128(key = salt_i, h_{i-1} || tokens_i as little-endian u32),   h_{-1} = root

`root` is the 16-byte digest of the model fingerprint, so blocks of different models, layouts or dtypes have
different hashes. `salt_i` is that of the authenticated tenant, keyed by the cluster's secret. So blocks of
different tenants have different hashes, which other processes cannot compute. Only blocks within a configured
prefix have a salt that all tenants share. Specification with test vectors: docs/block-hash.md.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.block_hashes import HASH_BYTES

SALT_LABEL = "tenant-salt"
MAX_SALT_BYTES = 64
_TOKEN_BYTES = 4

TokenArray = npt.NDArray[np.uint32]


def as_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> TokenArray:
    """Tokens as a contiguous little-endian u32 array, the form that is hashed and sent."""
    return np.ascontiguousarray(tokens, dtype="<u4")


@functools.lru_cache(1024)
def tenant_salt(tenant: str, *, key: bytes = b"") -> bytes:
    """The 32-byte salt of an authenticated tenant. The name must never come from client input.

    `key`: ClusterSecret.derive(SALT_LABEL); without it anyone who knows the name can compute the salt.
    """
    return hashlib.blake2b(tenant.encode(), key=key, digest_size=32, person=b"slipstream-salt").digest()


def shared_salt(*, key: bytes = b"") -> bytes:
    """The 32-byte salt of blocks that all tenants share; different from that of every tenant."""
    return hashlib.blake2b(key=key, digest_size=32, person=b"slipstream-share").digest()


class SharedPrefix(msgspec.Struct, frozen=True, gc=False):
    """The leading blocks of a prompt that all tenants share: their salt and their number."""

    salt: bytes = b""
    n_blocks: int = 0

    def after(self, n_hashed: int) -> SharedPrefix:
        """The tokens that are left after the first `n_hashed` blocks of the prompt."""
        return SharedPrefix(self.salt, max(self.n_blocks - n_hashed, 0))


NOTHING_SHARED = SharedPrefix()


def chain_hashes(
    tokens: Sequence[int] | npt.NDArray[np.integer],
    *,
    root: bytes,
    salt: bytes,
    block_tokens: int,
    shared: SharedPrefix = NOTHING_SHARED,
) -> list[bytes]:
    """Hashes of all full blocks of `tokens`, 16 bytes each; an incomplete last block has none."""
    chain = HashChain(root=root, salt=salt, block_tokens=block_tokens)
    return chain.extend(tokens, shared=shared)


class ChainState(msgspec.Struct, frozen=True, gc=False):
    """The end of a chain: the hash of the last full block (or the root), and the packed tokens after it."""

    last: bytes
    tail: bytes = b""


def extend_chain(
    state: ChainState,
    tokens: Sequence[int] | npt.NDArray[np.integer],
    *,
    salt: bytes,
    block_tokens: int,
    shared: SharedPrefix = NOTHING_SHARED,
) -> tuple[ChainState, list[bytes]]:
    """The chain after `tokens`, and the hashes of the blocks that became full. Hashes only these tokens.

    The first `shared.n_blocks` of these blocks have the shared salt; `state` ends with a full block then.
    """
    if shared.n_blocks:
        tokens, n_shared = as_tokens(tokens), shared.n_blocks * block_tokens
        if state.tail or len(tokens) < n_shared:
            raise ValueError("shared blocks must be full and whole")
        state, first = extend_chain(state, tokens[:n_shared], salt=shared.salt, block_tokens=block_tokens)
        state, rest = extend_chain(state, tokens[n_shared:], salt=salt, block_tokens=block_tokens)
        return state, first + rest
    pending = state.tail + as_tokens(tokens).tobytes()
    block_bytes = _TOKEN_BYTES * block_tokens
    full_bytes = len(pending) - len(pending) % block_bytes
    if not full_bytes:
        return ChainState(state.last, pending), []
    last = state.last
    fresh: list[bytes] = []
    keyed = hashlib.blake2b(key=salt, digest_size=HASH_BYTES)
    for start in range(0, full_bytes, block_bytes):
        block = keyed.copy()  # faster than hashing the key again
        block.update(last + pending[start : start + block_bytes])
        last = block.digest()
        fresh.append(last)
    return ChainState(last, pending[full_bytes:]), fresh


class HashChain:
    """The chain hash of a growing sequence; hashes only new tokens."""

    def __init__(
        self,
        *,
        root: bytes,
        salt: bytes,
        block_tokens: int,
        hashes: Sequence[bytes] = (),
        after: ChainState | None = None,
    ) -> None:
        """`hashes` and `after`: the hashes and the end of a chain to continue."""
        if len(root) != HASH_BYTES:
            raise ValueError(f"root must have {HASH_BYTES} bytes, not {len(root)}")
        if len(salt) > MAX_SALT_BYTES:
            raise ValueError(f"salt must have at most {MAX_SALT_BYTES} bytes, not {len(salt)}")
        if block_tokens < 1:
            raise ValueError("block_tokens must be positive")
        self._salt = salt
        self._block_tokens = block_tokens
        self._state = after or ChainState(root)
        self.hashes: list[bytes] = list(hashes)

    def extend(
        self, tokens: Sequence[int] | npt.NDArray[np.integer], *, shared: SharedPrefix = NOTHING_SHARED
    ) -> list[bytes]:
        """Append tokens; returns the hashes of the blocks that became full."""
        self._state, fresh = extend_chain(
            self._state, tokens, salt=self._salt, block_tokens=self._block_tokens, shared=shared
        )
        self.hashes.extend(fresh)
        return fresh

"""Computes which part of a prompt must be sent to a worker, based on earlier prompts. Pure.

Workers cache prompts (libs/worker/requests/prompt_cache.py). So a request refers to the prefix that its
prompt shares with an earlier one, by the chain hash of the prefix's last full block. It has only the ids
after that. The router estimates what a worker caches: a worker that has evicted the prefix answers
PrefixUnknown, and the router sends the whole prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from libs.common import service_bounds
from libs.common.block_hash import (
    NOTHING_SHARED,
    ChainState,
    SharedPrefix,
    TokenArray,
    as_tokens,
    extend_chain,
)
from slipstream import errors
from slipstream.block_hashes import pack_hashes
from slipstream.v1 import decode_pb2, prefill_pb2

# PrefixUnknown multiplies the limit of blocks that a worker is expected to cache by this, down to a minimum.
_LIMIT_DECREASE = 0.75
_MIN_LIMIT_BLOCKS = 64
# The limit rises by one block for each so many blocks that are sent.
_BLOCKS_PER_INCREASE = 8

R = TypeVar("R", prefill_pb2.StartPrefill, decode_pb2.StartSequence)


class OutgoingPrompt:
    """A prompt as workers receive it: ids and hashes of full blocks.

    The packed bytes of each form (whole, or after a prefix) are shared by all requests until `drop_packed`.
    """

    __slots__ = ("_packed", "_root", "block_tokens", "hashes", "ids", "salt", "shared")

    def __init__(
        self,
        ids: TokenArray,
        hashes: Sequence[bytes],
        *,
        root: bytes,
        salt: bytes,
        block_tokens: int,
        shared: SharedPrefix = NOTHING_SHARED,
    ) -> None:
        """`root`: that of the hash chain; `salt`: the tenant's, for all blocks but the `shared` ones."""
        self.ids = ids
        self.hashes = hashes
        self.salt = salt
        self.shared = shared
        self.block_tokens = block_tokens
        self._root = root
        self._packed: dict[int, tuple[bytes, bytes]] = {}  # ids and hashes, by the blocks of the prefix

    def __len__(self) -> int:
        return len(self.ids)

    def followed_by(self, emitted: Sequence[int]) -> OutgoingPrompt:
        """This prompt with ids appended. Hashes only the appended ids."""
        if not emitted:
            return self
        more, n_hashed = as_tokens(emitted), len(self.hashes) * self.block_tokens
        state = ChainState(self.hashes[-1] if self.hashes else self._root, self.ids[n_hashed:].tobytes())
        _, fresh = extend_chain(state, more, salt=self.salt, block_tokens=self.block_tokens)
        return OutgoingPrompt(
            np.concatenate([self.ids, more]),
            [*self.hashes, *fresh],
            root=self._root,
            salt=self.salt,
            block_tokens=self.block_tokens,
            shared=self.shared,
        )

    def drop_packed(self) -> None:
        """Free the packed bytes, once the worker has the prompt; `write_to` packs them again if necessary."""
        self._packed.clear()

    def write_to(self, request: R, *, after_blocks: int = 0) -> None:
        """Set the prompt of a request that has none: what follows the first `after_blocks` blocks, with a
        reference to them; 0 for the whole prompt."""
        packed = self._packed.get(after_blocks)
        if packed is None:
            ids = self.ids[after_blocks * self.block_tokens :].tobytes()
            packed = self._packed[after_blocks] = (ids, pack_hashes(self.hashes[after_blocks:]))
        request.prompt, request.block_hashes = packed
        if after_blocks:
            prefix = request.prefix
            prefix.blocks, prefix.hash = after_blocks, self.hashes[after_blocks - 1]


class RemotePromptCache:
    """Blocks that a worker is expected to cache together with all blocks before them.

    Bounded by a limit; over it, about half of the blocks, those used least recently, are dropped at once. The
    limit falls when the worker did not know a prefix, and rises slowly as blocks are sent.
    """

    def __init__(self, *, max_blocks: int = service_bounds.MAX_REMOTE_CACHE_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._limit = float(max_blocks)
        self._recent: dict[bytes, None] = {}
        self._older: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)

    def known_blocks(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt the worker is expected to cache."""
        # Backwards, as a turn adds few blocks; sending an unknown prompt costs more than this search.
        recent, older = self._recent, self._older
        for n_blocks in range(len(hashes), 0, -1):
            block_hash = hashes[n_blocks - 1]
            if block_hash in recent or block_hash in older:
                return n_blocks
        return 0

    def add_sent(self, hashes: Sequence[bytes], *, after_blocks: int) -> None:
        """Record a prompt that was sent with a reference to its first `after_blocks` blocks."""
        fresh = hashes[max(after_blocks - 1, 0) :]
        self._limit = min(self._limit + len(fresh) / _BLOCKS_PER_INCREASE, self._max_blocks)
        if len(self._recent) + len(fresh) > self._limit / 2:
            self._older, self._recent = self._recent, {}
        if len(fresh) <= self._limit / 2:
            self._recent.update(dict.fromkeys(fresh))

    def remove_unknown(self, hashes: Sequence[bytes], *, after_blocks: int) -> None:
        """Remove block `after_blocks` of a prompt and those after it: the worker did not know that prefix."""
        for block_hash in hashes[after_blocks - 1 :]:
            self._recent.pop(block_hash, None)
            self._older.pop(block_hash, None)
        self._limit = max(_LIMIT_DECREASE * self._limit, min(_MIN_LIMIT_BLOCKS, self._max_blocks))


@dataclass(slots=True)
class SentPrompt(Generic[R]):
    """A request as it was sent, with a reference to `prefix_blocks` blocks; 0: with the whole prompt."""

    request: R
    prompt: OutgoingPrompt
    prefix_blocks: int


class PromptSender:
    """Writes prompts into the requests of one stream, and tracks what the worker at its end caches."""

    def __init__(self, *, min_tokens: int = service_bounds.MIN_PREFIX_REF_TOKENS) -> None:
        self.remote = RemotePromptCache()
        self._min_tokens = min_tokens

    def send(self, request: R, prompt: OutgoingPrompt) -> SentPrompt[R]:
        """Set the prompt of a request: whole, or its ids after a prefix that the worker caches."""
        n_blocks = 0
        if len(prompt) >= self._min_tokens:
            n_blocks = self.remote.known_blocks(prompt.hashes)
            if n_blocks * prompt.block_tokens < self._min_tokens:
                n_blocks = 0
            self.remote.add_sent(prompt.hashes, after_blocks=n_blocks)
        prompt.write_to(request, after_blocks=n_blocks)
        return SentPrompt(request, prompt, n_blocks)

    def send_whole(self, sent: SentPrompt[R], error: errors.SlipstreamError) -> bool:
        """Whether a request failed only because the worker did not know the prefix.

        Then the request has the whole prompt now, and the caller sends it again.
        """
        if not sent.prefix_blocks or not isinstance(error, errors.PrefixUnknown):
            return False
        self.remote.remove_unknown(sent.prompt.hashes, after_blocks=sent.prefix_blocks)
        self.remote.add_sent(sent.prompt.hashes, after_blocks=0)
        sent.request.ClearField("prefix")
        sent.prompt.write_to(sent.request)
        sent.prefix_blocks = 0
        return True

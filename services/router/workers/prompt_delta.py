"""What of a prompt a worker has to be sent, given what it was sent before. Pure.

Workers that offer it remember prompts (requests/prompt_cache.py), so that a turn of a conversation names
the beginning it has in common with an earlier one, by the chain hash of its last full block, and sends the
ids after it. What a worker remembers is only believed here: it answers PrefixUnknown to what it has
forgotten, and the prompt is sent again, whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from libs.common import service_bounds
from libs.common.block_hash import ChainState, TokenArray, as_tokens, extend_chain
from slipstream import errors
from slipstream.block_hashes import pack_hashes
from slipstream.v1 import decode_pb2, prefill_pb2

# After an answer of "unknown" so much of what was believed is believed on.
_TRUST_KEPT = 0.75
_LEAST_BELIEVED = 64
# Blocks sent for each one that may be believed more again.
_BLOCKS_A_MORE = 8

R = TypeVar("R", prefill_pb2.PrefillRequest, decode_pb2.StartSequence)


class OutgoingPrompt:
    """A prompt as workers get it: its ids and the hashes of its full blocks. Each form is made once for all
    workers that it goes to, until it is forgotten."""

    __slots__ = ("_packed", "_root", "block_tokens", "hashes", "ids", "salt")

    def __init__(
        self, ids: TokenArray, hashes: Sequence[bytes], *, root: bytes, salt: bytes, block_tokens: int
    ) -> None:
        """`root`: of the hash chain; `salt`: the tenant's."""
        self.ids = ids
        self.hashes = hashes
        self.salt = salt
        self.block_tokens = block_tokens
        self._root = root
        self._packed: dict[int, tuple[bytes, bytes]] = {}  # ids and hashes, by how many blocks are named

    def __len__(self) -> int:
        return len(self.ids)

    def followed_by(self, emitted: Sequence[int]) -> OutgoingPrompt:
        """The prompt with these ids after it. Only they are hashed."""
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
        )

    def forget_packed(self) -> None:
        """It arrived. The forms it was sent in are as large as itself; they are made anew if need be."""
        self._packed.clear()

    def write_to(self, request: R, *, after_blocks: int = 0) -> None:
        """The whole prompt, or what follows its first `after_blocks` blocks and the name of these. To
        a request that has no prompt yet."""
        packed = self._packed.get(after_blocks)
        if packed is None:
            ids = self.ids[after_blocks * self.block_tokens :].tobytes()
            packed = self._packed[after_blocks] = (ids, pack_hashes(self.hashes[after_blocks:]))
        request.prompt, request.block_hashes = packed
        if after_blocks:
            prefix = request.prefix
            prefix.blocks, prefix.hash = after_blocks, self.hashes[after_blocks - 1]


class RemotePromptCache:
    """Blocks that the worker at the end of a stream is believed to remember with all before them. Bounded: of
    the blocks used least lately some half is forgotten at once. How much is believed falls when the worker
    did not know what was named, and rises slowly with what is sent."""

    def __init__(self, *, max_blocks: int = service_bounds.MAX_BELIEVED_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._limit = float(max_blocks)
        self._young: dict[bytes, None] = {}
        self._old: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def known_blocks(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks that the worker should know; 0 = none."""
        # From the end: a turn is short, and a prompt nothing is known of is sent whole, which costs far more.
        young, old = self._young, self._old
        for n_blocks in range(len(hashes), 0, -1):
            block_hash = hashes[n_blocks - 1]
            if block_hash in young or block_hash in old:
                return n_blocks
        return 0

    def sent(self, hashes: Sequence[bytes], *, after_blocks: int) -> None:
        """A prompt was sent, of which `after_blocks` were only named."""
        fresh = hashes[max(after_blocks - 1, 0) :]
        self._limit = min(self._limit + len(fresh) / _BLOCKS_A_MORE, self._max_blocks)
        if len(self._young) + len(fresh) > self._limit / 2:
            self._old, self._young = self._young, {}
        if len(fresh) <= self._limit / 2:
            self._young.update(dict.fromkeys(fresh))

    def unknown(self, hashes: Sequence[bytes], *, after_blocks: int) -> None:
        """The worker did not know the first `after_blocks`, nor then any block after them."""
        for block_hash in hashes[after_blocks - 1 :]:
            self._young.pop(block_hash, None)
            self._old.pop(block_hash, None)
        self._limit = max(_TRUST_KEPT * self._limit, min(_LEAST_BELIEVED, self._max_blocks))


@dataclass(slots=True)
class SentPrompt(Generic[R]):
    """A request as it was sent. `named_blocks` of its prompt were only named; 0 = it was sent whole."""

    request: R
    prompt: OutgoingPrompt
    named_blocks: int


class PromptSender:
    """Writes prompts into the requests on one stream to a worker, and keeps account of them."""

    def __init__(self, *, min_tokens: int = service_bounds.LEAST_NAMED_TOKENS) -> None:
        self.believed = RemotePromptCache()
        self._min_tokens = min_tokens

    def send(self, request: R, prompt: OutgoingPrompt, *, may_name: bool) -> SentPrompt[R]:
        """Fill in what of the prompt has to be sent."""
        n_blocks = 0
        if may_name and len(prompt) >= self._min_tokens:
            n_blocks = self.believed.known_blocks(prompt.hashes)
            if n_blocks * prompt.block_tokens < self._min_tokens:
                n_blocks = 0
            self.believed.sent(prompt.hashes, after_blocks=n_blocks)
        prompt.write_to(request, after_blocks=n_blocks)
        return SentPrompt(request, prompt, n_blocks)

    def send_whole(self, sent: SentPrompt[R], error: errors.SlipstreamError) -> bool:
        """Whether what was sent failed only because the worker did not know what was named. Then the request
        has the whole prompt now, and is to be sent again."""
        if not sent.named_blocks or not isinstance(error, errors.PrefixUnknown):
            return False
        self.believed.unknown(sent.prompt.hashes, after_blocks=sent.named_blocks)
        self.believed.sent(sent.prompt.hashes, after_blocks=0)
        sent.request.ClearField("prefix")
        sent.prompt.write_to(sent.request)
        sent.named_blocks = 0
        return True

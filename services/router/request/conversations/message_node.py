"""A node of the tree of conversations: messages with their token ids and block hashes. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from libs.common.radix.node import RadixNode
from services.router.request.conversations.message_key import (
    NO_REASONING,
    REASONING_DROPPED,
    REASONING_KEPT,
    Label,
    MessageKey,
    RawMessage,
    label_of,
    message_bytes,
    raw_of,
    reasoning_of,
)

ID_BYTES = 4  # a token id, as little-endian u32
NODE_BYTES = 1000  # objects around the messages
# So many messages are compared as lists; if these differ, they are compared again one by one.
_COMPARED_TOGETHER = 32


@dataclass(slots=True)
class NodeHashes:
    """Hashes of a node's first blocks, those that end within the node.

    `chain` is the root and the block size that they were computed with. A node that is split, merged or cut
    gets a new object.
    """

    chain: tuple[bytes, int] | None = None
    hashes: list[bytes] = field(default_factory=list)


class NewMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that the cache lacks, as a node keeps it."""

    key: MessageKey
    raw: RawMessage | None
    reasoning: int
    ids: bytes
    n_bytes: int

    @classmethod
    def of(
        cls, key: MessageKey, message: Mapping[str, Any] | None, ids: bytes, *, keeps_reasoning: bool
    ) -> NewMessage:
        """`message`: as the request has it; None for the header. `ids` are packed."""
        raw = None if message is None else raw_of(message)
        reasoning = NO_REASONING if message is None else reasoning_of(message, kept=keeps_reasoning)
        return cls(key, raw, reasoning, ids, message_bytes(key, raw, n_tokens=len(ids) // ID_BYTES))


class MessageNode(RadixNode):
    """Consecutive messages, after `begin` tokens. `ends`: the tokens up to the end of each message.

    `ids` only grows: a split or cut node has another bytearray, so a reader of the first bytes keeps them.
    """

    __slots__ = ("begin", "content_bytes", "ends", "hashed", "ids", "labeled", "raw", "reasoning", "sizes")

    def __init__(self, tenant: Hashable = None) -> None:
        super().__init__(tenant)
        self.begin = 0
        self.labeled: dict[Label, Self] = {}  # children by the labels of their first messages
        self.keys: list[MessageKey] = []
        self.raw: list[RawMessage | None] = []
        self.reasoning = bytearray()
        self.ends: list[int] = []
        self.sizes: list[int] = []  # bytes of each message
        self.content_bytes = 0  # their sum
        self.ids = bytearray()
        self.hashed = NodeHashes()

    @property
    def end(self) -> int:
        """Tokens of the conversation up to the node's end."""
        return self.ends[-1] if self.ends else self.begin

    def count_equal(self, at: int, messages: Sequence[Any], first: int, *, kept_from: int) -> int:
        """How many messages from `at` on equal those of a request from its `first` on.

        The request's reasoning is rendered from its message `kept_from` on.
        """
        n, most = 0, min(len(self.raw) - at, len(messages) - first)
        while n < most:
            here, there = at + n, first + n
            length = min(most - n, _COMPARED_TOGETHER)
            if self.raw[here : here + length] == messages[there : there + length]:
                n += length
                continue
            while n < most and self.raw[at + n] == messages[first + n]:
                n += 1
            break
        border = max(0, min(n, kept_from - first))
        for wrong, begin, end in ((REASONING_KEPT, 0, border), (REASONING_DROPPED, border, n)):
            found = self.reasoning.find(wrong, at + begin, at + end)
            if found >= 0:
                return found - at
        return n

    def extend(self, messages: Sequence[NewMessage]) -> None:
        """Append messages."""
        sizes = [message.n_bytes for message in messages]
        self.keys += [message.key for message in messages]
        self.raw += [message.raw for message in messages]
        self.reasoning += bytes([message.reasoning for message in messages])
        n_tokens = [len(message.ids) // ID_BYTES for message in messages]
        self.ends += itertools.islice(itertools.accumulate(n_tokens, initial=self.end), 1, None)
        self.sizes += sizes
        self.content_bytes += sum(sizes)
        self.ids += b"".join([message.ids for message in messages])

    # ---- the tree

    def size_bytes(self) -> int:
        return NODE_BYTES + self.content_bytes

    def keys_after_eviction(self, excess_bytes: int) -> int:
        n_kept = len(self.keys)
        while n_kept and excess_bytes > 0:
            n_kept -= 1
            excess_bytes -= self.sizes[n_kept]
        return n_kept

    def link(self, child: Self) -> None:
        super().link(child)
        label = child._label()
        if label is not None:
            self.labeled[label] = child

    def unlink(self, child: Self) -> None:
        super().unlink(child)
        label = child._label()
        if label is not None and self.labeled.get(label) is child:
            del self.labeled[label]

    def _label(self) -> Label | None:
        raw = self.raw[0]
        return label_of(raw) if raw is not None and self.reasoning[0] == NO_REASONING else None

    def move_head(self, head: Self, n_keys: int) -> None:
        head.begin, self.begin = self.begin, self.ends[n_keys - 1]
        n_bytes = ID_BYTES * (self.begin - head.begin)
        head.ids, self.ids = self.ids[:n_bytes], self.ids[n_bytes:]
        head.keys, self.keys = self.keys[:n_keys], self.keys[n_keys:]
        head.raw, self.raw = self.raw[:n_keys], self.raw[n_keys:]
        head.reasoning, self.reasoning = self.reasoning[:n_keys], self.reasoning[n_keys:]
        head.ends, self.ends = self.ends[:n_keys], self.ends[n_keys:]
        head.sizes, self.sizes = self.sizes[:n_keys], self.sizes[n_keys:]
        head.content_bytes = sum(head.sizes)
        self.content_bytes -= head.content_bytes
        chain, hashes = self.hashed.chain, self.hashed.hashes
        n_blocks = _count_blocks(head.begin, self.begin, chain)
        head.hashed, self.hashed = NodeHashes(chain, hashes[:n_blocks]), NodeHashes(chain, hashes[n_blocks:])

    def absorb(self, child: Self) -> None:
        mine, its = self.hashed, child.hashed
        is_complete = len(mine.hashes) == _count_blocks(self.begin, self.end, mine.chain)
        is_joined = mine.chain == its.chain and is_complete
        self.hashed = NodeHashes(mine.chain, mine.hashes + its.hashes if is_joined else mine.hashes)
        self.labeled = child.labeled
        self.keys += child.keys
        self.raw += child.raw
        self.reasoning += child.reasoning
        self.ends += child.ends
        self.sizes += child.sizes
        self.content_bytes += child.content_bytes
        self.ids += child.ids

    def truncate(self, n_keys: int) -> None:
        self.content_bytes -= sum(self.sizes[n_keys:])
        for values in (self.keys, self.raw, self.reasoning, self.ends, self.sizes):
            del values[n_keys:]
        self.ids = self.ids[: ID_BYTES * (self.end - self.begin)]
        chain = self.hashed.chain
        self.hashed = NodeHashes(chain, self.hashed.hashes[: _count_blocks(self.begin, self.end, chain)])


def _count_blocks(begin: int, end: int, chain: tuple[bytes, int] | None) -> int:
    """Blocks of a chain that end after `begin` tokens of a conversation and up to its `end`."""
    return end // chain[1] - begin // chain[1] if chain is not None else 0

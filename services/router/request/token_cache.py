"""Caches token ids and block hashes of conversations, so that a turn encodes only its new messages. Pure.

The chat template's text segments are encoded one by one, so the ids of a conversation are those of its
messages, concatenated (libs/text/chat_template.py). Each tenant has a radix tree of messages: a common prefix
(a system prompt with tools, a conversation so far) is stored once. No session name is needed, and no tenant
sees another's messages. A node (message_node.py) holds consecutive messages with their ids and the hashes of
the blocks that end in it, for the fingerprint last used.

Requests are matched by their raw messages (message_key.py), many at once; only unmatched messages are
rendered. Memory is bounded for each tenant and in all: the last messages of the least recently used
conversations are evicted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from libs.common.block_hash import (
    NOTHING_SHARED,
    ChainState,
    SharedPrefix,
    TokenArray,
    as_tokens,
    extend_chain,
)
from libs.common.radix.lru import TenantLru
from libs.common.radix.tree import RadixTree
from libs.text.chat_template import Segment
from services.router.request.cursor import PromptCursor
from services.router.request.message_key import (
    NO_REASONING,
    MessageKey,
    chars_of,
    pieces_of,
    raw_of,
    reasoning_of,
    split_messages,
)
from services.router.request.message_node import ID_BYTES, MessageNode, NodeHashes

T = TypeVar("T")

MAX_BYTES = 512 << 20
MAX_TENANT_BYTES = 256 << 20
TENANT_BYTES = 1400  # the size of a tenant's name, root and LRU list

Render = Callable[[int, int | None], list[Segment]]


@dataclass(slots=True)
class _Query:
    """The arguments of `look_up`."""

    tenant: str
    messages: Sequence[Mapping[str, Any]]
    render: Render
    header: Sequence[Segment]
    kept_from: int


@dataclass(slots=True)
class Conversation:
    """A conversation of which the last messages, `missing`, have to be encoded.

    `n_known` messages are before them; `known` has their ids in parts, each with its number of bytes.
    `first` is the first message of the request that is missing. The ids stay valid, all else only for one
    `version` of the tree.
    """

    query: _Query
    cursor: PromptCursor
    known: list[tuple[bytearray, int]]
    n_known: int
    missing: list[MessageKey]
    first: int
    version: int

    @property
    def known_tokens(self) -> int:
        """The number of ids that need no encoding."""
        return sum([n_bytes for _, n_bytes in self.known]) // ID_BYTES

    @property
    def missing_chars(self) -> int:
        """The number of characters to encode."""
        return sum(map(chars_of, self.missing))


class CachedChat:
    """A conversation as ids (read only), `encoded_tokens` of which were not cached before."""

    __slots__ = ("_parts", "encoded_tokens", "ids")

    def __init__(
        self, ids: TokenArray, encoded_tokens: int, parts: Sequence[tuple[NodeHashes, int, int]]
    ) -> None:
        """`parts`: where hashes are cached, each with the tokens where the part begins and ends."""
        self.ids = ids
        self.encoded_tokens = encoded_tokens
        self._parts = parts

    def hashes(
        self,
        *,
        root: bytes,
        salt: bytes,
        block_tokens: int,
        more: Sequence[int] = (),
        shared: SharedPrefix = NOTHING_SHARED,
    ) -> tuple[list[bytes], ChainState, int]:
        """Hashes of all full blocks of `ids` and `more`, the chain's end, and how many tokens were hashed.

        Caches the hashes that were missing. The salts must depend on the tenant and the ids alone.
        """
        chain = (root, block_tokens)
        found: list[bytes] = []
        for part, begin, end in self._parts:
            n_blocks = end // block_tokens - begin // block_tokens
            if part.chain == chain:
                found += part.hashes[:n_blocks]
            if len(found) < end // block_tokens:
                break
        rest = self.ids[len(found) * block_tokens :]
        if more:
            rest = np.concatenate([rest, as_tokens(more)])
        state = ChainState(found[-1] if found else root)
        state, fresh = extend_chain(
            state, rest, salt=salt, block_tokens=block_tokens, shared=shared.after(len(found))
        )
        found += fresh
        for part, begin, end in self._parts if fresh else ():
            if part.chain != chain:
                part.chain, part.hashes = chain, []
            known = begin // block_tokens + len(part.hashes)
            if known < end // block_tokens:
                part.hashes += found[known : end // block_tokens]
        return found, state, len(rest)


class _MessageTree(RadixTree[MessageNode]):
    """The trees of all tenants with messages. `roots` are by tenant."""

    def __init__(self, lru: TenantLru[MessageNode]) -> None:
        super().__init__(MessageNode, lru)
        self.roots: dict[Hashable, MessageNode] = {}

    def add(self, tenant: Hashable, parent: MessageNode | None = None) -> MessageNode:
        node = super().add(tenant, parent)
        if parent is not None:
            node.begin = parent.end
        return node

    def cut(self, end: MessageNode, n_keys: int) -> MessageNode | None:
        parent = super().cut(end, n_keys)
        if parent is not None and not parent.keys and not parent.children:
            del self.roots[end.tenant]
        return parent


class TokenCache:
    """See the module's text. Not thread-safe; only `encode` may run on another thread."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, max_tenant_bytes: int = MAX_TENANT_BYTES) -> None:
        self._lru = TenantLru[MessageNode](
            max_bytes=max_bytes, max_tenant_bytes=max_tenant_bytes, tenant_bytes=TENANT_BYTES
        )
        self._tree = _MessageTree(self._lru)

    @property
    def n_bytes(self) -> int:
        """The approximate memory of the cache."""
        return self._lru.n_bytes

    def gauges(self) -> dict[str, float]:
        """The cache's metrics by name (libs/common/telemetry/metric_table.py)."""
        return {"slipstream_token_cache_bytes": float(self.n_bytes)}

    def tenant_bytes(self, tenant: str) -> int:
        """The approximate memory of a tenant's conversations."""
        return self._lru.tenant_bytes(tenant)

    def look_up(
        self,
        tenant: str,
        messages: Sequence[Mapping[str, Any]],
        render: Render,
        *,
        header: Sequence[Segment] = (),
        kept_from: int | None = None,
    ) -> Conversation:
        """Match a conversation with the cached ones.

        `header` is rendered before the messages. `render(n, end)` gives the segments of the messages from the
        n-th up to before `end`; without `end` up to the last. `kept_from`: the first message whose reasoning
        is rendered; None: that of no message is.
        """
        if kept_from is None:
            kept_from = len(messages)
        return self._look_up(_Query(tenant, messages, render, header, kept_from))

    def _look_up(self, query: _Query) -> Conversation:
        messages, root = query.messages, self._tree.roots.get(query.tenant)
        cursor = PromptCursor([root if root is not None else MessageNode()])
        missing: list[MessageKey] = []
        n_known = first = 0
        if query.header:
            missing = split_messages(query.header)
            n_known = cursor.advance(missing)
            del missing[:n_known]
            if missing:
                missing += split_messages(query.render(0, None))
        while not missing:
            first = cursor.follow(messages, first, kept_from=query.kept_from)
            # The next message may be cached in another raw form, so it is rendered alone first.
            is_single = first + 1 < len(messages) and cursor.has_next
            missing = split_messages(query.render(first, first + 1 if is_single else None))
            n_more = cursor.advance(missing)
            first += n_more
            del missing[:n_more]
            if not is_single:
                break
            if missing:
                missing += split_messages(query.render(first + 1, None))
        known = cursor.ids()
        return Conversation(query, cursor, known, n_known + first, missing, first, self._tree.version)

    def finish(self, conversation: Conversation, encoded: Sequence[bytes], tail: bytes) -> CachedChat:
        """Cache the ids that `encode` returned; returns all ids of the conversation.

        `tail`: the ids of what follows the last message.
        """
        known = [ids if n_bytes == len(ids) else ids[:n_bytes] for ids, n_bytes in conversation.known]
        ids = unpack_ids(b"".join([*known, *encoded, tail]))
        cursor = self._insert(conversation, encoded)
        parts = [(node.hashed, node.begin, end) for node, end in cursor.parts()] if cursor is not None else ()
        self._tree.make_room([conversation.query.tenant])
        return CachedChat(ids, (sum(map(len, encoded)) + len(tail)) // ID_BYTES, parts)

    def _insert(self, conversation: Conversation, encoded: Sequence[bytes]) -> PromptCursor | None:
        """The position of the conversation's end; None if messages before the missing ones were evicted."""
        if conversation.version != self._tree.version:
            current = self._look_up(conversation.query)
            n_more = current.n_known - conversation.n_known  # cached by another request meanwhile
            if n_more < 0:
                return None
            conversation, encoded = current, encoded[n_more:]
        cursor, tenant = conversation.cursor, conversation.query.tenant
        if conversation.missing:
            self._tree.roots.setdefault(tenant, cursor.path[0])
            self._append(conversation, encoded)
        self._lru.touch(cursor.path[1:], tenant)
        return cursor

    def _append(self, conversation: Conversation, encoded: Sequence[bytes]) -> None:
        """Insert the missing messages at the conversation's cursor, and move the cursor to their end."""
        query, cursor = conversation.query, conversation.cursor
        end = self._tree.open_end(cursor.path, cursor.at, query.tenant)
        n_before = len(query.messages) - len(conversation.missing)
        for i, (key, ids) in enumerate(zip(conversation.missing, encoded, strict=True), n_before):
            if i < 0:  # the header
                end.append(key, None, NO_REASONING, ids)
                continue
            message = query.messages[i]
            end.append(key, raw_of(message), reasoning_of(message, kept=i >= query.kept_from), ids)
        self._tree.grew(end)
        cursor.at = len(end.keys)


def encode(
    conversation: Conversation,
    encode_pieces: Callable[[str], Iterable[list[int]]],
    special_id: Callable[[str], int],
) -> Generator[int, None, list[bytes]]:
    """Encode the missing messages piece by piece; returns their ids, packed.

    Yields the number of ids so far after each piece of text. Shares no state with the cache.
    """
    packed: list[bytes] = []
    n_ids = 0
    for key in conversation.missing:
        ids = yield from encode_segments(pieces_of(key), encode_pieces, special_id, n_before=n_ids)
        n_ids += len(ids)
        packed.append(pack_ids(ids))
    return packed


def encode_segments(
    segments: Iterable[tuple[bool, str]],
    encode_pieces: Callable[[str], Iterable[list[int]]],
    special_id: Callable[[str], int],
    *,
    n_before: int,
) -> Generator[int, None, list[int]]:
    """Encode (control, text) of each segment; yields as `encode`, counting from `n_before`."""
    ids: list[int] = []
    for control, text in segments:
        if control:
            ids.append(special_id(text))
            continue
        for piece in encode_pieces(text):
            ids += piece
            yield n_before + len(ids)
    return ids


def run_to_end(pieces: Generator[int, None, T]) -> T:
    """All pieces at once; returns what the generator returns."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack_ids(packed: bytes) -> TokenArray:
    """Packed ids as a read-only array on the same memory."""
    return np.frombuffer(packed, dtype="<u4")

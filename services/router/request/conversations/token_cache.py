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
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

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
from services.router.request.conversations.chat_query import ChatQuery
from services.router.request.conversations.cursor import PromptCursor
from services.router.request.conversations.message_key import MessageKey, chars_of, pieces_of
from services.router.request.conversations.message_node import ID_BYTES, MessageNode, NewMessage, NodeHashes

T = TypeVar("T")

MAX_BYTES = 512 << 20
MAX_TENANT_BYTES = 256 << 20
# A list takes ten times the memory of packed ids.
PACKED_TOGETHER = 65_536
TENANT_BYTES = 1400  # the size of a tenant's name, root and LRU list


@dataclass(slots=True)
class Conversation:
    """A conversation of which the last messages, `missing`, have to be encoded.

    `n_known` messages are before them; `known` has their ids in parts, each with its number of bytes.
    `first` is the first message of the request that is missing. The ids stay valid, all else only for one
    `version` of the tree.
    """

    query: ChatQuery
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
    """A conversation as ids (read only), and its hashes."""

    __slots__ = ("_parts", "ids")

    def __init__(self, ids: TokenArray, parts: Sequence[tuple[NodeHashes, int, int]]) -> None:
        """`parts`: where hashes are cached, each with the tokens where the part begins and ends."""
        self.ids = ids
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
        """The cache's metrics by name (libs/common/telemetry/metric_tables/table.py)."""
        return {"slipstream_token_cache_bytes": float(self.n_bytes)}

    def tenant_bytes(self, tenant: str) -> int:
        """The approximate memory of a tenant's conversations."""
        return self._lru.tenant_bytes(tenant)

    def first_unknown(self, query: ChatQuery) -> int:
        """The first message that the cache lacks by its raw form: `look_up` may render those from it on."""
        cursor = self._cursor(query)
        if cursor.advance(query.header) < len(query.header):
            return 0
        return cursor.follow(query.messages, 0, kept_from=query.kept_from)

    def look_up(self, query: ChatQuery) -> Conversation:
        """Match a conversation with the cached ones."""
        messages, cursor = query.messages, self._cursor(query)
        missing: list[MessageKey] = []
        n_known = first = 0
        if query.header:
            n_known = cursor.advance(query.header)
            missing = query.header[n_known:]
            if missing:
                missing += query.keys(0)
        while not missing:
            first = cursor.follow(messages, first, kept_from=query.kept_from)
            # The next message may be cached in another raw form, so it is rendered alone first.
            is_single = first + 1 < len(messages) and cursor.has_next
            missing = query.keys(first, first + 1 if is_single else None)
            n_more = cursor.advance(missing)
            first += n_more
            del missing[:n_more]
            if not is_single:
                break
            if missing:
                missing += query.keys(first + 1)
        known = cursor.ids()
        return Conversation(query, cursor, known, n_known + first, missing, first, self._tree.version)

    def _cursor(self, query: ChatQuery) -> PromptCursor:
        root = self._tree.roots.get(query.tenant)
        return PromptCursor([root if root is not None else MessageNode()])

    def finish(self, conversation: Conversation, new: Sequence[NewMessage], tail: bytes) -> CachedChat:
        """Cache the messages that `encode` returned; returns all ids of the conversation.

        `tail`: the ids of what follows the last message.
        """
        known = [ids if n_bytes == len(ids) else ids[:n_bytes] for ids, n_bytes in conversation.known]
        ids = unpack_ids(b"".join([*known, *[message.ids for message in new], tail]))
        cursor = self._insert(conversation, new)
        parts = [(node.hashed, node.begin, end) for node, end in cursor.parts()] if cursor is not None else ()
        self._tree.make_room([conversation.query.tenant])
        return CachedChat(ids, parts)

    def _insert(self, conversation: Conversation, new: Sequence[NewMessage]) -> PromptCursor | None:
        """The position of the conversation's end; None if messages before the missing ones were evicted."""
        if conversation.version != self._tree.version:
            current = self.look_up(conversation.query)
            n_more = current.n_known - conversation.n_known  # cached by another request meanwhile
            if n_more < 0:
                return None
            conversation, new = current, new[n_more:]
        cursor, tenant = conversation.cursor, conversation.query.tenant
        if new:
            self._tree.roots.setdefault(tenant, cursor.path[0])
            end = self._tree.open_end(cursor.path, cursor.at, tenant)
            end.extend(new)
            self._tree.grew(end)
            cursor.at = len(end.keys)
        self._lru.touch(cursor.path[1:], tenant)
        return cursor


def join_ids(conversation: Conversation, new: Sequence[NewMessage], tail: bytes) -> TokenArray:
    """All ids of a conversation, with those that `encode` returned. May run on any thread."""
    known = [ids[:n_bytes] for ids, n_bytes in conversation.known]  # the cache may extend what it has
    return unpack_ids(b"".join([*known, *[message.ids for message in new], tail]))


def count_new(new: Sequence[NewMessage], tail: bytes) -> int:
    """The number of ids that `encode` returned, with those of `tail`."""
    return (sum([len(message.ids) for message in new]) + len(tail)) // ID_BYTES


def encode(
    conversation: Conversation,
    encode_pieces: Callable[[str], Iterable[list[int]]],
    special_id: Callable[[str], int],
) -> Generator[int, None, list[NewMessage]]:
    """Encode the missing messages piece by piece; returns them as the cache keeps them.

    Yields the number of ids so far after each piece of text. Shares no state with the cache.
    """
    query = conversation.query
    new: list[NewMessage] = []
    n_ids = 0
    for index, key in enumerate(conversation.missing, len(query.messages) - len(conversation.missing)):
        ids = yield from encode_segments(pieces_of(key), encode_pieces, special_id, n_before=n_ids)
        n_ids += len(ids) // ID_BYTES
        message = query.messages[index] if index >= 0 else None  # None: of the header
        new.append(NewMessage.of(key, message, ids, keeps_reasoning=index >= query.kept_from))
    return new


def encode_segments(
    segments: Iterable[tuple[bool, str]],
    encode_pieces: Callable[[str], Iterable[list[int]]],
    special_id: Callable[[str], int],
    *,
    n_before: int,
) -> Generator[int, None, bytes]:
    """Encode (control, text) of each segment to packed ids; yields as `encode`, counting from `n_before`."""
    packed, ids = bytearray(), list[int]()
    for control, text in segments:
        if control:
            ids.append(special_id(text))
            continue
        for piece in encode_pieces(text):
            ids += piece
            yield n_before + len(packed) // ID_BYTES + len(ids)
            if len(ids) >= PACKED_TOGETHER:
                packed += pack_ids(ids)
                ids = []
    return bytes(packed) + pack_ids(ids)


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

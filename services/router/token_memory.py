"""Ids and block hashes of conversations, kept by the message: a turn pays for what is new in it. Pure.

The chat template's text segments are encoded one by one, so the ids of a conversation are those of its
messages in a row (libs/text/chat_template.py). Messages form a tree below each tenant: a node is one
rendered message after all before it, with its ids and, for the fingerprint last used, the hashes of the
blocks that become full in it. Equal beginnings (a system prompt with its tools, a conversation so far)
share nodes; no session name is needed, and no tenant sees another's.

Messages of plain text are found as the request has them, before anything is rendered: their rendering hangs
on nothing around them.

Memory is bounded for each tenant and in all. A node is always used more lately than those below it, so
the least recently used node is a leaf, and forgetting it costs the next turn one message.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from libs.common.block_hash import ChainState, TokenArray, as_tokens, extend_chain
from libs.text.chat_template import Segment
from libs.text.special_tokens import IM_END

MAX_BYTES = 512 << 20
MAX_TENANT_BYTES = 256 << 20
_NODE_BYTES = 600  # objects around the data
_EMPTY = np.empty(0, dtype="<u4")

# One rendered message: (control, text) of each of its segments.
MessageKey = tuple[tuple[bool, str], ...]
# One message as the request has it, where that says how it is rendered.
PlainKey = tuple[tuple[str, str], ...]
_NAMELESS: PlainKey = ()  # rendered by its place in the conversation, or more than text


class _Node:
    """A message after all before it. `chain`: the state of the block hash after it, and its own hashes."""

    __slots__ = ("chain", "children", "hashes", "ids", "key", "n_bytes", "parent", "plain", "root")

    def __init__(
        self, parent: _Node | None, key: MessageKey, ids: TokenArray, plain: PlainKey = _NAMELESS
    ) -> None:
        self.parent = parent
        self.key = key
        self.plain = plain  # its other name below its parent, if it has one
        self.ids = ids
        self.children: dict[MessageKey | PlainKey, _Node] = {}
        self.root: tuple[bytes, int] | None = None
        self.chain: ChainState | None = None
        self.hashes: list[bytes] = []
        # Most texts are the same object in both names; that of a tool's result is not.
        texts = {id(text): len(text) for _, text in (*key, *plain)}
        # Hashes come later; a block has at least 16 tokens in any use.
        self.n_bytes = _NODE_BYTES + sum(texts.values()) + ids.nbytes + 4 * len(ids)


@dataclass(slots=True)
class Conversation:
    """A conversation on its way to ids: `missing` are the last messages, which have to be encoded, and
    `tail` the generation prompt, which always is. `plain`: other names of those missing."""

    tenant: str
    path: list[_Node]
    missing: list[list[Segment]]
    tail: list[Segment]
    plain: list[PlainKey]

    @property
    def missing_chars(self) -> int:
        """Text to encode."""
        return sum(len(s.text) for group in (*self.missing, self.tail) for s in group if not s.control)


@dataclass(slots=True)
class EncodedChat:
    """A conversation as ids; `encoded_tokens` of them were not known before."""

    ids: TokenArray
    encoded_tokens: int
    _path: list[_Node]

    def hashes(
        self, *, root: bytes, salt: bytes, block_tokens: int, more: Sequence[int] = ()
    ) -> tuple[list[bytes], ChainState, int]:
        """Hashes of all full blocks of `ids` and `more`, the chain after them, and how many tokens were
        hashed for that."""
        at = ChainState(root, _EMPTY)
        found: list[bytes] = []
        hashed = done = 0
        for node in self._path:
            if node.root != (root, block_tokens) or node.chain is None:
                node.chain, node.hashes = extend_chain(at, node.ids, salt=salt, block_tokens=block_tokens)
                node.root = (root, block_tokens)
                hashed += len(node.ids)
            at = node.chain
            found += node.hashes
            done += len(node.ids)
        rest = np.concatenate([self.ids[done:], as_tokens(more)]) if more else self.ids[done:]
        at, fresh = extend_chain(at, rest, salt=salt, block_tokens=block_tokens)
        return found + fresh, at, hashed + len(rest)


class TokenMemory:
    """See the module's text. Not thread-safe; only `encode` may run elsewhere."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, max_tenant_bytes: int = MAX_TENANT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._roots: dict[str, dict[MessageKey | PlainKey, _Node]] = {}
        self._used: dict[str, OrderedDict[_Node, None]] = {}  # by tenant, least recently used first
        self._bytes: dict[str, int] = {}

    @property
    def n_bytes(self) -> int:
        """All that is kept, about."""
        return sum(self._bytes.values())

    def tenant_bytes(self, tenant: str) -> int:
        """What is kept for a tenant."""
        return self._bytes.get(tenant, 0)

    def look_up(
        self,
        tenant: str,
        messages: Sequence[Mapping[str, Any]],
        render: Callable[[int], list[Segment]],
        *,
        header: Sequence[Segment] = (),
    ) -> Conversation:
        """What is known of a conversation. `header`: what is rendered before its messages. `render(n)` gives
        the segments of its messages from the n-th on, and of what follows the last."""
        path: list[_Node] = []
        before, _ = _messages(header)
        is_known = self._follow(tenant, path, map(_key, before)) == len(before)
        n_known = self._follow(tenant, path, map(_plain_key, messages)) if is_known else 0
        missing, tail = _messages(render(n_known))
        plain = [_plain_key(message) for message in messages[n_known:]]
        if is_known:
            n_more = self._follow(tenant, path, map(_key, missing))
            missing, plain = missing[n_more:], plain[n_more:]
        else:
            missing, plain = before + missing, [_NAMELESS] * len(before) + plain
        self._touch(tenant, path)
        return Conversation(tenant, path, missing, tail, plain)

    def _follow(self, tenant: str, path: list[_Node], keys: Iterable[MessageKey | PlainKey]) -> int:
        """Goes on with `path` as far as these messages are known; returns how many."""
        before = len(path)
        children = path[-1].children if path else self._roots.get(tenant, {})
        for key in keys:
            node = children.get(key)
            if node is None:
                break
            path.append(node)
            children = node.children
        return len(path) - before

    def finish(
        self, conversation: Conversation, encoded: Sequence[TokenArray], tail: TokenArray
    ) -> EncodedChat:
        """Keep what `encode` made of the conversation; returns all of its ids."""
        tenant, path = conversation.tenant, list(conversation.path)
        children = path[-1].children if path else self._roots.setdefault(tenant, {})
        used = self._used.setdefault(tenant, OrderedDict())
        for message, plain, ids in zip(conversation.missing, conversation.plain, encoded, strict=True):
            key = _key(message)
            # Another request may have brought it meanwhile, or memory ran out for what was before it.
            node = children.get(key)
            if node is None:
                node = children[key] = _Node(path[-1] if path else None, key, ids, plain)
                if plain:
                    children[plain] = node
                self._bytes[tenant] = self._bytes.get(tenant, 0) + node.n_bytes
                used[node] = None
            path.append(node)
            children = node.children
        self._touch(tenant, path)
        self._make_room(tenant)
        ids = np.concatenate([*(node.ids for node in path), tail]) if path else tail
        return EncodedChat(ids, sum(map(len, encoded)) + len(tail), path)

    def _touch(self, tenant: str, path: Sequence[_Node]) -> None:
        used = self._used.get(tenant)
        if used is not None:
            for node in reversed(path):
                if node in used:
                    used.move_to_end(node)

    def _make_room(self, tenant: str) -> None:
        while self._bytes.get(tenant, 0) > self._max_tenant_bytes:
            self._forget_oldest(tenant)
        while self.n_bytes > self._max_bytes:
            self._forget_oldest(max(self._bytes, key=self._bytes.__getitem__))

    def _forget_oldest(self, tenant: str) -> None:
        used = self._used[tenant]
        node, _ = used.popitem(last=False)
        self._bytes[tenant] -= node.n_bytes
        siblings = node.parent.children if node.parent is not None else self._roots[tenant]
        if siblings.get(node.key) is node:
            del siblings[node.key]
        if node.plain and siblings.get(node.plain) is node:
            del siblings[node.plain]
        if not used:
            del self._used[tenant], self._bytes[tenant]
            self._roots.pop(tenant, None)


def encode(
    conversation: Conversation, encode_text: Callable[[str], list[int]], special_id: Callable[[str], int]
) -> tuple[list[TokenArray], TokenArray]:
    """Ids of the missing messages and of the tail. Costs CPU for long text; touches no shared state."""

    def ids(segments: Sequence[Segment]) -> TokenArray:
        out: list[int] = []
        for segment in segments:
            if segment.control:
                out.append(special_id(segment.text))
            else:
                out.extend(encode_text(segment.text))
        return as_tokens(out)

    return [ids(message) for message in conversation.missing], ids(conversation.tail)


def _messages(segments: Sequence[Segment]) -> tuple[list[list[Segment]], list[Segment]]:
    """The rendered messages, each up to its end token, and what follows the last one."""
    messages: list[list[Segment]] = []
    current: list[Segment] = []
    for segment in segments:
        current.append(segment)
        if segment.control and segment.text == IM_END:
            messages.append(current)
            current = []
    return messages, current


def _plain_key(message: Mapping[str, Any]) -> PlainKey:
    for name, value in message.items():
        if type(value) is not str or name == "reasoning_content":
            return _NAMELESS
    return tuple(message.items())


def _key(message: Sequence[Segment]) -> MessageKey:
    return tuple((segment.control, segment.text) for segment in message)

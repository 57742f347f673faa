"""Ids and block hashes of conversations: a turn pays for what is new in it, and for a copy. Pure.

The chat template's text segments are encoded one by one, so the ids of a conversation are those of its
messages in a row (libs/text/chat_template.py). Messages form a tree below each tenant: equal beginnings (a
system prompt with its tools, a conversation so far) are kept once; no session name is needed, and no tenant
sees another's. Messages that only one way leads on from lie together in a run (token_run.py), with their ids
in a row and, for the fingerprint last used, the hashes of the blocks that become full in it: of a long
conversation there are a few runs.

Messages are found as requests have them (token_message.py), many compared at once; only what is not found
like that is rendered.

Memory is bounded for each tenant and in all. A run is always used more lately than those that go on from it,
so the least recently used one is an end: its last messages are forgotten, and a run that only one goes on
from afterwards becomes one with it.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from libs.common.block_hash import ChainState, TokenArray, as_tokens, extend_chain
from libs.text.chat_template import Segment
from services.router.request.cursor import PromptCursor
from services.router.request.message_key import (
    NO_REASONING,
    MessageKey,
    chars_of,
    name_of,
    pieces_of,
    reasoning_of,
    split_messages,
)
from services.router.request.message_run import ID_BYTES, RUN_BYTES, MessageRun, RunHashes

MAX_BYTES = 512 << 20
MAX_TENANT_BYTES = 256 << 20
# Of an end that gives way so much goes at least, so that what is left is not copied for each message.
_LEAST_FORGOTTEN = 1 / 8
# Who has most is looked for among this many tenants, those heard of least lately.
_MOST_COMPARED = 64
TENANT_BYTES = 1400  # its name, its root, and the order of its runs' use

Render = Callable[[int, int | None], list[Segment]]


@dataclass(slots=True)
class _Tenant:
    """`used`: all runs but the root, least recently used first."""

    root: MessageRun
    used: OrderedDict[MessageRun, None] = field(default_factory=OrderedDict)
    n_bytes: int = 0


@dataclass(slots=True)
class _Asked:
    """What `look_up` was asked for."""

    tenant: str
    messages: Sequence[Mapping[str, Any]]
    render: Render
    header: Sequence[Segment]
    kept_from: int


@dataclass(slots=True)
class Conversation:
    """A conversation on its way to ids: `missing` are the last messages, which have to be encoded. `n_known`
    are before them, with ids in these parts, of so many bytes each; `first`: the first message of the request
    that is missing. All of that is good until the memory's `changes`; the ids stay."""

    asked: _Asked
    place: PromptCursor
    known: list[tuple[bytearray, int]]
    n_known: int
    missing: list[MessageKey]
    first: int
    changes: int

    @property
    def missing_chars(self) -> int:
        """Text to encode."""
        return sum(map(chars_of, self.missing))


class EncodedChat:
    """A conversation as ids (read only); `encoded_tokens` of them were not known before."""

    __slots__ = ("_parts", "encoded_tokens", "ids")

    def __init__(
        self, ids: TokenArray, encoded_tokens: int, parts: Sequence[tuple[RunHashes, int, int]]
    ) -> None:
        """`parts`: where hashes are kept, of the tokens from where to where."""
        self.ids = ids
        self.encoded_tokens = encoded_tokens
        self._parts = parts

    def hashes(
        self, *, root: bytes, salt: bytes, block_tokens: int, more: Sequence[int] = ()
    ) -> tuple[list[bytes], ChainState, int]:
        """Hashes of all full blocks of `ids` and `more`, the chain after them, and how many tokens were
        hashed for that."""
        of = (root, block_tokens)
        found: list[bytes] = []
        for part, begin, end in self._parts:
            n_blocks = end // block_tokens - begin // block_tokens
            if part.of == of:
                found += part.hashes[:n_blocks]
            if len(found) < end // block_tokens:
                break
        rest = self.ids[len(found) * block_tokens :]
        if more:
            rest = np.concatenate([rest, as_tokens(more)])
        state = ChainState(found[-1] if found else root)
        state, fresh = extend_chain(state, rest, salt=salt, block_tokens=block_tokens)
        found += fresh
        for part, begin, end in self._parts if fresh else ():
            if part.of != of:
                part.of, part.hashes = of, []
            known = begin // block_tokens + len(part.hashes)
            if known < end // block_tokens:
                part.hashes += found[known : end // block_tokens]
        return found, state, len(rest)


class TokenCache:
    """See the module's text. Not thread-safe; only `encode` may run elsewhere."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, max_tenant_bytes: int = MAX_TENANT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # heard of least lately first
        self._changes = 0  # of which messages are in which runs
        self.n_bytes = 0  # all that is kept, about

    def gauges(self) -> dict[str, float]:
        """Its figures by metric name (libs/common/rpc/telemetry.py)."""
        return {"slipstream_token_memory_bytes": float(self.n_bytes)}

    def tenant_bytes(self, tenant: str) -> int:
        """What is kept for a tenant."""
        known = self._tenants.get(tenant)
        return known.n_bytes if known is not None else 0

    def look_up(
        self,
        tenant: str,
        messages: Sequence[Mapping[str, Any]],
        render: Render,
        *,
        header: Sequence[Segment] = (),
        kept_from: int | None = None,
    ) -> Conversation:
        """What is known of a conversation. `header`: what is rendered before its messages. `render(n, end)`
        gives the segments of its messages from the n-th up to before `end`; without `end` up to the last.
        `kept_from`: the first message whose reasoning is rendered; None: no one's."""
        if kept_from is None:
            kept_from = len(messages)
        return self._look_up(_Asked(tenant, messages, render, header, kept_from))

    def _look_up(self, asked: _Asked) -> Conversation:
        messages, tenant = asked.messages, self._tenants.get(asked.tenant)
        place = PromptCursor([tenant.root if tenant is not None else MessageRun(None, 0)])
        missing: list[MessageKey] = []
        n_known = first = 0
        if asked.header:
            missing = split_messages(asked.header)
            n_known = place.steps(missing)
            del missing[:n_known]
            if missing:
                missing += split_messages(asked.render(0, None))
        while not missing:
            first = place.follow(messages, first, kept_from=asked.kept_from)
            # Perhaps it goes on with the same, said in another way.
            alone = first + 1 < len(messages) and place.goes_on
            missing = split_messages(asked.render(first, first + 1 if alone else None))
            n_more = place.steps(missing)
            first += n_more
            del missing[:n_more]
            if not alone:
                break
            if missing:
                missing += split_messages(asked.render(first + 1, None))
        known = place.ids()
        return Conversation(asked, place, known, n_known + first, missing, first, self._changes)

    def finish(self, conversation: Conversation, encoded: Sequence[bytes], tail: bytes) -> EncodedChat:
        """Keep what `encode` made of the conversation; returns all of its ids. `tail`: the ids of what
        follows its last message."""
        known = [ids if n_bytes == len(ids) else ids[:n_bytes] for ids, n_bytes in conversation.known]
        ids = unpack_ids(b"".join([*known, *encoded, tail]))
        place = self._keep(conversation, encoded)
        parts = [(run.hashed, run.begin, end) for run, end in place.parts()] if place is not None else ()
        self._make_room(conversation.asked.tenant)
        return EncodedChat(ids, (sum(map(len, encoded)) + len(tail)) // ID_BYTES, parts)

    def _keep(self, conversation: Conversation, encoded: Sequence[bytes]) -> PromptCursor | None:
        """Where it ends now; None where what is before the missing messages was forgotten meanwhile."""
        if conversation.changes != self._changes:
            now = self._look_up(conversation.asked)
            n_more = now.n_known - conversation.n_known  # another request brought them
            if n_more < 0:
                return None
            conversation, encoded = now, encoded[n_more:]
        place, name = conversation.place, conversation.asked.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(place.runs[0])
            self._count(tenant, TENANT_BYTES)
        if conversation.missing:
            self._append(tenant, conversation, encoded)
        for run in reversed(place.runs[1:]):
            tenant.used.move_to_end(run)
        self._tenants.move_to_end(name)
        return place

    def _append(self, tenant: _Tenant, conversation: Conversation, encoded: Sequence[bytes]) -> None:
        """The missing messages, from the conversation's place on."""
        self._changes += 1
        asked, place = conversation.asked, conversation.place
        run = place.runs[-1]
        if place.at < len(run.keys):
            place.runs[-1] = run = run.part(place.at)
            tenant.used[run] = None
            self._count(tenant, RUN_BYTES)
        end, before = run, run.n_bytes
        if run.parent is None or run.children:
            end, before = MessageRun(run, run.end), 0
            place.runs.append(end)
            tenant.used[end] = None
        n_before = len(asked.messages) - len(conversation.missing)
        for i, (key, ids) in enumerate(zip(conversation.missing, encoded, strict=True), n_before):
            if i < 0:  # the header
                end.append(key, None, NO_REASONING, ids)
                continue
            message = asked.messages[i]
            end.append(key, name_of(message), reasoning_of(message, kept=i >= asked.kept_from), ids)
        if end is not run:
            run.adopt(end)
        place.at = len(end.keys)
        self._count(tenant, end.n_bytes - before)

    def _count(self, tenant: _Tenant, n_bytes: int) -> None:
        tenant.n_bytes += n_bytes
        self.n_bytes += n_bytes

    def _make_room(self, name: str) -> None:
        while (beyond := self.tenant_bytes(name) - self._max_tenant_bytes) > 0:
            self._forget(name, beyond)
        while (beyond := self.n_bytes - self._max_bytes) > 0:
            oldest = islice(self._tenants, _MOST_COMPARED)
            self._forget(max(oldest, key=lambda of: self._tenants[of].n_bytes), beyond)

    def _forget(self, name: str, n_bytes: int) -> None:
        """So much, or the whole, of the end used least lately."""
        self._changes += 1
        tenant = self._tenants[name]
        run = next(iter(tenant.used))
        before, parent = run.n_bytes, run.parent
        wanted = max(n_bytes, int(before * _LEAST_FORGOTTEN))
        n_kept = len(run.keys)
        while n_kept and wanted > 0:
            n_kept -= 1
            wanted -= run.sizes[n_kept]
        if n_kept:
            run.cut(n_kept)
            self._count(tenant, run.n_bytes - before)
            return
        assert parent is not None
        parent.disown(run)
        del tenant.used[run]
        self._count(tenant, -before)
        if parent.parent is not None and len(parent.children) == 1:
            (child,) = parent.children.values()
            parent.take(child)
            del tenant.used[child]
            self._count(tenant, -RUN_BYTES)
        if not tenant.used:
            del self._tenants[name]
            self._count(tenant, -TENANT_BYTES)


def encode(
    conversation: Conversation, encode_text: Callable[[str], list[int]], special_id: Callable[[str], int]
) -> list[bytes]:
    """Ids of the missing messages. Costs CPU for long text; touches no shared state."""

    def ids(key: MessageKey) -> bytes:
        out: list[int] = []
        for control, text in pieces_of(key):
            if control:
                out.append(special_id(text))
            else:
                out += encode_text(text)
        return pack_ids(out)

    return [ids(key) for key in conversation.missing]


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack_ids(packed: bytes) -> TokenArray:
    """Packed ids as an array that cannot be written to; nothing is copied."""
    return np.frombuffer(packed, dtype="<u4")

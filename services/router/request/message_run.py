"""A run of messages of a conversation that no other one parts from inside of, with ids and hashes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.router.request.message_key import (
    KEPT,
    LEFT_OUT,
    NO_REASONING,
    Label,
    MessageKey,
    Name,
    label_of,
    message_bytes,
)

ID_BYTES = 4  # a token id, as little-endian u32
RUN_BYTES = 1000  # objects around the messages
# Messages compared together: as many are compared again to find the one that differs.
_COMPARED_TOGETHER = 32


@dataclass(slots=True)
class RunHashes:
    """Hashes of the first of a run's blocks: of those that end within it. `of`: the root of their chain and
    the tokens of a block. Of a run that was cut, parted or joined there is another one."""

    of: tuple[bytes, int] | None = None
    hashes: list[bytes] = field(default_factory=list)


class MessageRun:
    """`begin` tokens are before it; `ends` are those of the conversation up to the end of each message. The
    root of a tenant's conversations is one without messages.

    `ids` only grows: cut or parted, a run has another one, and who has the first bytes in hand keeps them.
    """

    __slots__ = (
        "begin",
        "children",
        "ends",
        "hashed",
        "ids",
        "keys",
        "n_bytes",
        "named",
        "names",
        "parent",
        "reasoning",
        "sizes",
    )

    def __init__(self, parent: MessageRun | None, begin: int) -> None:
        self.parent = parent
        self.begin = begin
        self.children: dict[MessageKey, MessageRun] = {}  # by their first messages
        self.named: dict[Label, MessageRun] = {}  # the same
        self.keys: list[MessageKey] = []
        self.names: list[Name | None] = []
        self.reasoning = bytearray()
        self.ends: list[int] = []
        self.sizes: list[int] = []  # bytes of each message
        self.ids = bytearray()
        self.hashed = RunHashes()
        self.n_bytes = RUN_BYTES

    @property
    def end(self) -> int:
        """Tokens of the conversation up to its end."""
        return self.ends[-1] if self.ends else self.begin

    def same(self, at: int, messages: Sequence[Any], first: int, *, kept_from: int) -> int:
        """How many messages from `at` on have the names of those of a request from its `first` on. It keeps
        the reasoning of those from `kept_from` on."""
        n, most = 0, min(len(self.names) - at, len(messages) - first)
        while n < most:
            here, there = at + n, first + n
            length = min(most - n, _COMPARED_TOGETHER)
            if self.names[here : here + length] == messages[there : there + length]:
                n += length
                continue
            while n < most and self.names[at + n] == messages[first + n]:
                n += 1
            break
        border = max(0, min(n, kept_from - first))
        for wrong, begin, end in ((KEPT, 0, border), (LEFT_OUT, border, n)):
            found = self.reasoning.find(wrong, at + begin, at + end)
            if found >= 0:
                return found - at
        return n

    def append(self, key: MessageKey, name: Name | None, reasoning: int, ids: bytes) -> None:
        """One message more."""
        n_tokens = len(ids) // ID_BYTES
        self.keys.append(key)
        self.names.append(name)
        self.reasoning.append(reasoning)
        n_bytes = message_bytes(key, name, n_tokens=n_tokens)
        self.ends.append((self.ends[-1] if self.ends else self.begin) + n_tokens)
        self.sizes.append(n_bytes)
        self.ids += ids
        self.n_bytes += n_bytes

    # ---- children

    def adopt(self, child: MessageRun) -> None:
        """It goes on from here."""
        child.parent = self
        self.children[child.keys[0]] = child
        label = child._label()
        if label is not None:
            self.named[label] = child

    def disown(self, child: MessageRun) -> None:
        """It does no longer."""
        del self.children[child.keys[0]]
        label = child._label()
        if label is not None and self.named.get(label) is child:
            del self.named[label]

    def _label(self) -> Label | None:
        name = self.names[0]
        return label_of(name) if name is not None and self.reasoning[0] == NO_REASONING else None

    # ---- in two, in one, and less

    def part(self, at: int) -> MessageRun:
        """The first `at` messages become a run of their own, which this one goes on from."""
        assert self.parent is not None
        parent, first = self.parent, MessageRun(None, self.begin)
        parent.disown(self)
        first.begin, self.begin = self.begin, self.ends[at - 1]
        n_bytes = ID_BYTES * (self.begin - first.begin)
        first.ids, self.ids = self.ids[:n_bytes], self.ids[n_bytes:]
        first.keys, self.keys = self.keys[:at], self.keys[at:]
        first.names, self.names = self.names[:at], self.names[at:]
        first.reasoning, self.reasoning = self.reasoning[:at], self.reasoning[at:]
        first.ends, self.ends = self.ends[:at], self.ends[at:]
        first.sizes, self.sizes = self.sizes[:at], self.sizes[at:]
        moved = sum(first.sizes)
        first.n_bytes, self.n_bytes = RUN_BYTES + moved, self.n_bytes - moved
        of, hashes = self.hashed.of, self.hashed.hashes
        n_blocks = _blocks(first.begin, self.begin, of)
        first.hashed, self.hashed = RunHashes(of, hashes[:n_blocks]), RunHashes(of, hashes[n_blocks:])
        parent.adopt(first)
        first.adopt(self)
        return first

    def take(self, child: MessageRun) -> None:
        """The only one that goes on from here becomes its end."""
        mine, its = self.hashed, child.hashed
        all_hashed = mine.of == its.of and len(mine.hashes) == _blocks(self.begin, self.end, mine.of)
        self.hashed = RunHashes(mine.of, mine.hashes + its.hashes if all_hashed else mine.hashes)
        self.children, self.named = child.children, child.named
        for grandchild in self.children.values():
            grandchild.parent = self
        self.keys += child.keys
        self.names += child.names
        self.reasoning += child.reasoning
        self.ends += child.ends
        self.sizes += child.sizes
        self.ids += child.ids
        self.n_bytes += child.n_bytes - RUN_BYTES

    def cut(self, n_messages: int) -> None:
        """Keep the first of its messages, one at least."""
        self.n_bytes -= sum(self.sizes[n_messages:])
        for values in (self.keys, self.names, self.reasoning, self.ends, self.sizes):
            del values[n_messages:]
        self.ids = self.ids[: ID_BYTES * (self.end - self.begin)]
        of = self.hashed.of
        self.hashed = RunHashes(of, self.hashed.hashes[: _blocks(self.begin, self.end, of)])


def _blocks(begin: int, end: int, of: tuple[bytes, int] | None) -> int:
    """Full blocks that end after `begin` tokens of a conversation and up to its `end`."""
    return end // of[1] - begin // of[1] if of is not None else 0

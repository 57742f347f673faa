"""Adoption of pool copies whose putter has left. Pure.

A node watches the blocks that it put, and counts as another node after a restart (its segment is renamed).
For each block the living nodes agree on one adopter by rendezvous hashing, without communication. The adopter
reads the block's header once, which names its predecessor and its putter. It watches the block while the
putter is not among the living; a putter that was only silent takes its blocks back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import xxhash

from services.kvstore.pool.value import ValueOrigin, tag_of

MAX_HINTS = 65_536
CHECK_BLOCKS = 1024
# Headers read at one poll; each read renews the block's lease in the pool.
READ_BLOCKS = 64


class WatchedBlocks(Protocol):
    """The blocks that this node watches (`UnreachableWatch`)."""

    def __contains__(self, key: object, /) -> bool:
        """Whether this node watches the block."""
        ...

    def put(self, key: bytes, before: bytes) -> None:
        """Watch the block, which comes after `before` in its chain."""
        ...

    def discard(self, keys: Sequence[bytes]) -> None:
        """Watch these blocks no more, since another node does."""
        ...


class BlockAdoption:
    """One node's share of the blocks."""

    def __init__(self, watched: WatchedBlocks) -> None:
        self._watched = watched
        self._own = b""
        self._living: frozenset[bytes] = frozenset()
        self._hints: OrderedDict[bytes, ValueOrigin | None] = OrderedDict()
        self._unchecked: list[bytes] = []
        self.adopted_blocks = 0

    def set_members(self, segments: Sequence[str], *, own: str) -> None:
        """Set the segments of the living nodes, and this node's own."""
        self._living = frozenset(map(tag_of, segments))
        self._own = tag_of(own)

    def poll(self, held: Callable[[], Collection[bytes]]) -> list[bytes]:
        """Check the next part of the held blocks; returns the blocks whose headers must be read."""
        wanted: list[bytes] = []
        if self._own not in self._living:  # this node has no segment, or the master does not list it yet
            return wanted
        if not self._unchecked:
            self._unchecked = list(held())
            self.discard_hints(self._hints.keys() - set(self._unchecked))
        for _ in range(min(CHECK_BLOCKS, len(self._unchecked))):
            key = self._unchecked.pop()
            if key in self._watched:
                if (hint := self._hints.get(key)) is not None and not (
                    self._is_lost(hint) and self.is_adopter(key)
                ):
                    self._watched.discard([key])
            elif not self.is_adopter(key):
                continue
            elif key not in self._hints:
                wanted.append(key)
                if len(wanted) == READ_BLOCKS:
                    break
            else:
                self._adopt_if_lost(key, self._hints[key])
        return wanted

    def add_hint(self, key: bytes, hint: ValueOrigin | None) -> None:
        """Record the hint of a block's header."""
        self._hints[key] = hint
        while len(self._hints) > MAX_HINTS:
            self._hints.popitem(last=False)
        self._adopt_if_lost(key, hint)

    def discard_hints(self, keys: Iterable[bytes]) -> None:
        """Remove the hints of blocks that are gone or that this node has put itself."""
        for key in keys:
            self._hints.pop(key, None)

    def is_adopter(self, key: bytes) -> bool:
        """Whether the living nodes' hashing chooses this node for the block."""
        return max(self._living, key=lambda tag: xxhash.xxh3_64_intdigest(tag + key)) == self._own

    def _adopt_if_lost(self, key: bytes, hint: ValueOrigin | None) -> None:
        if hint is not None and self._is_lost(hint):
            self.adopted_blocks += 1
            self._watched.put(key, hint.before)

    def _is_lost(self, hint: ValueOrigin) -> bool:
        return hint.putter not in self._living

"""Who looks after copies in the pool whose putter is gone. Pure.

Each node looks after what it put, and is another node after a restart (its segment has another name). Of each
block the living nodes agree on one by rendezvous hashing, without a word to each other: that one reads the
block's header once, which says what is before it in its chain and who put it, and looks after it while the
putter is not among the living: one that was silent for a while is among them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import xxhash

from services.kvstore.pool.value import Hint, tag_of

MAX_HINTS = 65_536
LOOK_BLOCKS = 1024
# Headers asked for at one look; each question keeps its block in the pool for a moment longer.
READ_BLOCKS = 64


class OwnerFailover:
    """One node's share. `is_watched`: a block is looked after by this node already; `adopt(key, before)`, and
    `release` what another one looks after now."""

    def __init__(
        self,
        *,
        is_watched: Callable[[bytes], bool],
        adopt: Callable[[bytes, bytes], None],
        release: Callable[[Sequence[bytes]], None],
    ) -> None:
        self._is_watched = is_watched
        self._adopt = adopt
        self._release = release
        self._own = b""
        self._living: frozenset[bytes] = frozenset()
        self._hints: OrderedDict[bytes, Hint | None] = OrderedDict()
        self._turn: list[bytes] = []
        self.adopted_blocks = 0

    def members(self, segments: Sequence[str], *, own: str) -> None:
        """The segments of the living nodes, and this node's."""
        self._living = frozenset(map(tag_of, segments))
        self._own = tag_of(own)

    def look(self, held: Callable[[], Collection[bytes]]) -> list[bytes]:
        """Look at some more of what the pool holds, in turns; the blocks whose headers are to be read."""
        wanted: list[bytes] = []
        if self._own not in self._living:  # it contributes nothing, or is not known yet
            return wanted
        if not self._turn:
            self._turn = list(held())
            self.forget(self._hints.keys() - set(self._turn))
        for _ in range(min(LOOK_BLOCKS, len(self._turn))):
            key = self._turn.pop()
            if self._is_watched(key):
                if (hint := self._hints.get(key)) is not None and not (
                    self._lost(hint) and self.is_mine(key)
                ):
                    self._release([key])
            elif not self.is_mine(key):
                continue
            elif key not in self._hints:
                wanted.append(key)
                if len(wanted) == READ_BLOCKS:
                    break
            else:
                self._judge(key, self._hints[key])
        return wanted

    def learnt(self, key: bytes, hint: Hint | None) -> None:
        """What the block's header says."""
        self._hints[key] = hint
        while len(self._hints) > MAX_HINTS:
            self._hints.popitem(last=False)
        self._judge(key, hint)

    def forget(self, keys: Iterable[bytes]) -> None:
        """These are there no more, or were put by this node: what their headers said is of no account."""
        for key in keys:
            self._hints.pop(key, None)

    def is_mine(self, key: bytes) -> bool:
        """Whether the living agree on this node for the block."""
        return max(self._living, key=lambda tag: xxhash.xxh3_64_intdigest(tag + key)) == self._own

    def _judge(self, key: bytes, hint: Hint | None) -> None:
        if hint is not None and self._lost(hint):
            self.adopted_blocks += 1
            self._adopt(key, hint.before)

    def _lost(self, hint: Hint) -> bool:
        return hint.putter not in self._living

"""Blocks of a tier that no look-up reaches: those before them in their chain are in no tier any more. Pure.

A look-up takes a chain from its start on, so it never finds a block without the one before it. Disks and the
pool lose blocks one by one. The pool evicts the least recently used and knows no chains. A disk loses a block
that does not verify or a whole segment. A block that stays unreachable for a while is dropped, and then those
after it in turn, without further patience.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

MAX_WATCHED_BLOCKS = 65_536
# At each look: some milliseconds of the event loop where none of them can be used.
LOOK_BLOCKS = 1024
# The time in which the next turn of a chain that lost its start most likely puts it again.
GRACE_S = 60.0
DROP_BLOCKS = 64
# The watch checks the successors of a dropped block within this time; a block that was put again is new.
INHERIT_S = 600.0


class WatchedTier(Protocol):
    """The tier whose blocks are watched."""

    def is_present(self, key: bytes) -> bool:
        """Whether the block is in this tier."""
        ...

    def is_usable(self, key: bytes) -> bool:
        """Whether the block is in any tier from which it can be read."""
        ...

    def is_spared(self, key: bytes) -> bool:
        """Whether the block stays for now, though it is unreachable."""
        ...


class UnreachableWatch:
    """Blocks that are watched, with the block before each."""

    def __init__(self, tier: WatchedTier, *, reports_losses: bool = False) -> None:
        """`reports_losses`: the caller puts a block again when the tier loses the one before it. So a block
        needs no watch while its predecessor is in the tier and is not watched."""
        self._tier = tier
        self._reports_losses = reports_losses
        self._before: OrderedDict[bytes, bytes] = OrderedDict()
        self._since_s: dict[bytes, float] = {}
        self._dropped_s: OrderedDict[bytes, float] = OrderedDict()  # when
        self.dropped_blocks = 0

    def __len__(self) -> int:
        """Blocks that are watched."""
        return len(self._before)

    def __contains__(self, key: object) -> bool:
        return key in self._before

    @property
    def blocks(self) -> int:
        """Unreachable blocks that are known now."""
        return len(self._since_s)

    def put(self, key: bytes, before: bytes) -> None:
        """The block comes after `before` in its chain."""
        self._dropped_s.pop(key, None)
        self._before[key] = before
        self._before.move_to_end(key, last=False)
        while len(self._before) > MAX_WATCHED_BLOCKS:
            self._discard(self._before.popitem()[0])

    def discard(self, keys: Sequence[bytes]) -> None:
        """Watch these blocks no more."""
        for key in keys:
            self._before.pop(key, None)
            self._discard(key)

    def clear(self) -> None:
        """The contents of a tier are unknown: patience begins from zero."""
        self._since_s.clear()
        self._dropped_s.clear()

    def poll(self, *, now_s: float) -> list[bytes]:
        """Look at the next of them; those to drop now, at most DROP_BLOCKS."""
        while self._dropped_s and now_s - next(iter(self._dropped_s.values())) > INHERIT_S:
            self._dropped_s.popitem(last=False)
        due: list[bytes] = []
        for _ in range(min(LOOK_BLOCKS, len(self._before))):
            key, before = self._before.popitem(last=False)
            if not self._tier.is_present(key) or (self._reports_losses and self._is_settled(before)):
                self._discard(key)
                continue
            self._before[key] = before
            if self._tier.is_usable(before):
                self._since_s.pop(key, None)
                continue
            dropped_s = self._dropped_s.get(before)
            since_s = self._since_s.setdefault(key, now_s if dropped_s is None else dropped_s - GRACE_S)
            if now_s - since_s >= GRACE_S and not self._tier.is_spared(key):
                due.append(key)
                if len(due) == DROP_BLOCKS:  # the next look goes on here
                    break
        return due

    def dropped(self, keys: Sequence[bytes], *, now_s: float) -> None:
        """Note that these unreachable blocks are gone from the tier."""
        self.dropped_blocks += len(keys)
        for key in keys:
            self._dropped_s[key] = now_s
            self._dropped_s.move_to_end(key)
        while len(self._dropped_s) > MAX_WATCHED_BLOCKS:
            self._dropped_s.popitem(last=False)
        self.discard(keys)

    def _is_settled(self, before: bytes) -> bool:
        return before not in self._before and self._tier.is_present(before)

    def _discard(self, key: bytes) -> None:
        self._since_s.pop(key, None)

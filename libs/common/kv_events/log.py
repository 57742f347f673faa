"""What a node holds and every change of it, in order: the memory behind `WatchBlocks`. Pure.

    log.stored(tier, hashes), log.removed(tier, hashes)     by the node, when it is so
    log.after(sequence)                                     by each watcher, from where it is

Changes are numbered from 1. Those made before any watcher has seen the newest one join it when they say
the same of the same tier, so that a burst is one change. The log remembers the last `max_remembered`
hashes of changes; who is further behind begins again with a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slipstream.block_hashes import HASH_BYTES
from slipstream.errors import Unavailable

MAX_REMEMBERED_BLOCKS = 65_536
MAX_CHANGE_BLOCKS = 4_096


class EventsForgotten(Unavailable):
    """The watcher is further behind than the log remembers; it begins again with a snapshot."""


@dataclass(frozen=True, slots=True)
class BlockChange:
    """Packed `hashes` that `tier` (a CacheTier) holds now, or holds no longer."""

    sequence: int
    stored: bool
    tier: int
    hashes: bytes


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """Packed hashes by tier, all changes up to and with `sequence` made."""

    sequence: int
    held: dict[int, bytes]


@dataclass(slots=True)
class _Group:
    stored: bool
    tier: int
    hashes: bytearray = field(default_factory=bytearray)


class BlockEventLog:
    """The log of one incarnation of a node. Used from one thread."""

    def __init__(
        self,
        incarnation: str,
        *,
        max_remembered: int = MAX_REMEMBERED_BLOCKS,
        max_change_blocks: int = MAX_CHANGE_BLOCKS,
    ) -> None:
        self.incarnation = incarnation
        self._max_remembered = max_remembered
        self._max_change_bytes = max_change_blocks * HASH_BYTES
        self._held: dict[int, set[bytes]] = {}
        self._groups: dict[int, _Group] = {}  # by sequence, without gaps
        self._remembered = 0
        self._oldest = 1
        self._sealed = 0  # the newest sequence that a watcher has seen

        self.sequence = 0

    def held(self, tier: int) -> frozenset[bytes]:
        """The hashes that the tier holds now."""
        return frozenset(self._held.get(tier, ()))

    def stored(self, tier: int, hashes: Iterable[bytes]) -> bool:
        """The tier holds these now; those it held already are passed over. Whether anything is new."""
        held = self._held.setdefault(tier, set())
        fresh = [key for key in dict.fromkeys(hashes) if key not in held]
        held.update(fresh)
        return self._record(stored=True, tier=tier, hashes=fresh)

    def removed(self, tier: int, hashes: Iterable[bytes]) -> bool:
        """The tier no longer holds these; those it did not hold are passed over. Whether any is gone."""
        held = self._held.get(tier, set())
        gone = [key for key in dict.fromkeys(hashes) if key in held]
        held.difference_update(gone)
        return self._record(stored=False, tier=tier, hashes=gone)

    def remembers(self, sequence: int) -> bool:
        """Whether a watcher that has seen everything up to `sequence` can go on from there."""
        return self._oldest - 1 <= sequence <= self.sequence

    def after(self, sequence: int) -> BlockChange | None:
        """The change after `sequence`, None when there is none yet. Raises EventsForgotten."""
        if not self.remembers(sequence):
            raise EventsForgotten(f"changes after {sequence} are forgotten; the oldest is {self._oldest}")
        group = self._groups.get(sequence + 1)
        if group is None:
            return None
        self._sealed = max(self._sealed, sequence + 1)
        return BlockChange(sequence + 1, group.stored, group.tier, bytes(group.hashes))

    def snapshot(self) -> HeldSnapshot:
        """All that is held now."""
        self._sealed = self.sequence
        held = {tier: b"".join(hashes) for tier, hashes in self._held.items() if hashes}
        return HeldSnapshot(self.sequence, held)

    def _record(self, *, stored: bool, tier: int, hashes: list[bytes]) -> bool:
        for key in hashes:
            if len(key) != HASH_BYTES:
                raise ValueError(f"a block hash has {HASH_BYTES} bytes, not {len(key)}")
            self._open_group(stored=stored, tier=tier).hashes.extend(key)
        self._remembered += len(hashes)
        while self._remembered > self._max_remembered:
            self._remembered -= len(self._groups.pop(self._oldest).hashes) // HASH_BYTES
            self._oldest += 1
        return bool(hashes)

    def _open_group(self, *, stored: bool, tier: int) -> _Group:
        """The newest group when it may still grow by one of this kind, else a new one."""
        newest = self._groups.get(self.sequence)
        if (
            newest is not None
            and self.sequence > self._sealed
            and (newest.stored, newest.tier) == (stored, tier)
            and len(newest.hashes) < self._max_change_bytes
        ):
            return newest
        self.sequence += 1
        group = self._groups[self.sequence] = _Group(stored, tier)
        return group

"""A node's KV blocks and the log of their changes, for `WatchBlocks`. Pure.

    log.stored(tier, hashes), log.removed(tier, hashes)     by the node
    log.after(sequence)                                     by each watcher, for the next change

Changes are numbered from 1. A change joins the newest one if both have the same kind and tier and no watcher
has seen that one. So a burst is one change. The log keeps the last `max_hashes` hashes of changes; a watcher
that is further behind starts again with a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slipstream.block_hashes import HASH_BYTES
from slipstream.errors import Unavailable

MAX_LOG_HASHES = 65_536
MAX_CHANGE_BLOCKS = 4_096


class EventsExpired(Unavailable):
    """The log no longer has the changes that a watcher needs; the watcher starts again with a snapshot."""


@dataclass(frozen=True, slots=True)
class BlockChange:
    """Packed `hashes` that a tier (CacheTier) stored or, with `stored` False, removed."""

    sequence: int
    stored: bool
    tier: int
    hashes: bytes


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """Packed hashes by tier, after all changes up to and including `sequence`."""

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
        max_hashes: int = MAX_LOG_HASHES,
        max_change_blocks: int = MAX_CHANGE_BLOCKS,
    ) -> None:
        self.incarnation = incarnation
        self._max_hashes = max_hashes
        self._max_change_bytes = max_change_blocks * HASH_BYTES
        self._held: dict[int, set[bytes]] = {}
        self._groups: dict[int, _Group] = {}  # by sequence, without gaps
        self._n_hashes = 0
        self._oldest = 1  # the lowest sequence in the log
        self._sealed = 0  # the highest sequence that a watcher has seen
        self.sequence = 0

    def held(self, tier: int) -> frozenset[bytes]:
        """The hashes of the tier's blocks."""
        return frozenset(self._held.get(tier, ()))

    def stored(self, tier: int, hashes: Iterable[bytes]) -> bool:
        """Record stored blocks; returns whether any of them is new."""
        held = self._held.setdefault(tier, set())
        fresh = [key for key in dict.fromkeys(hashes) if key not in held]
        held.update(fresh)
        return self._record(stored=True, tier=tier, hashes=fresh)

    def removed(self, tier: int, hashes: Iterable[bytes]) -> bool:
        """Record removed blocks; returns whether the tier had any of them."""
        held = self._held.get(tier, set())
        lost = [key for key in dict.fromkeys(hashes) if key in held]
        held.difference_update(lost)
        return self._record(stored=False, tier=tier, hashes=lost)

    def can_resume(self, sequence: int) -> bool:
        """Whether the log has all changes after `sequence`."""
        return self._oldest - 1 <= sequence <= self.sequence

    def after(self, sequence: int) -> BlockChange | None:
        """The change after `sequence`; None if it has not happened yet. Raises EventsExpired."""
        if not self.can_resume(sequence):
            raise EventsExpired(
                f"changes after {sequence} are not in the log, which starts at {self._oldest}"
            )
        group = self._groups.get(sequence + 1)
        if group is None:
            return None
        self._sealed = max(self._sealed, sequence + 1)
        return BlockChange(sequence + 1, group.stored, group.tier, bytes(group.hashes))

    def snapshot(self) -> HeldSnapshot:
        """All blocks of all tiers."""
        self._sealed = self.sequence
        held = {tier: b"".join(hashes) for tier, hashes in self._held.items() if hashes}
        return HeldSnapshot(self.sequence, held)

    def _record(self, *, stored: bool, tier: int, hashes: list[bytes]) -> bool:
        for key in hashes:
            if len(key) != HASH_BYTES:
                raise ValueError(f"a block hash has {HASH_BYTES} bytes, not {len(key)}")
            self._open_group(stored=stored, tier=tier).hashes.extend(key)
        self._n_hashes += len(hashes)
        while self._n_hashes > self._max_hashes:
            self._n_hashes -= len(self._groups.pop(self._oldest).hashes) // HASH_BYTES
            self._oldest += 1
        return bool(hashes)

    def _open_group(self, *, stored: bool, tier: int) -> _Group:
        """The newest group if a change of this kind may join it, else a new one."""
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

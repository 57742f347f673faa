"""The values that the pool holds, as far as a node knows. Pure.

A node learns of single blocks from its own puts and lookups. It learns of other nodes' puts and of evictions
from the master's list of all values, every few seconds. Lookups cannot replace the list, since each renews
the lease of its values (of 140 blocks, the pool kept exactly the 70 that were looked up).

A list is a snapshot. What this node has put or missed since it requested the list overrides the list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from services.kvstore.pool.eviction_stats import EvictionStats

# Bound of published blocks per pool: each costs 16 bytes on the wire and about 200 in a router.
MAX_INVENTORY_BLOCKS = 262_144

OnChange = Callable[[Collection[bytes], bool], None]


def _ignore(keys: Collection[bytes], held: bool) -> None:
    return


class Inventory:
    """The pool's blocks. `on_change(keys, held)` receives every change once."""

    def __init__(
        self, *, max_blocks: int = MAX_INVENTORY_BLOCKS, now_ms: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._now_ms = now_ms
        self.eviction_stats = EvictionStats()
        self.on_change: OnChange = _ignore
        self._max_blocks = max_blocks
        self._held: set[bytes] = set()
        self._listed: set[bytes] = set()
        self._added: dict[bytes, int] = {}  # blocks this node saw -> number of lists requested by then
        self._removed: dict[bytes, int] = {}  # blocks this node missed, likewise
        self._last_requested = 0
        self._last_applied = 0  # number of the last list that has arrived or failed
        self._truncated = False  # the bound left out some blocks

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    @property
    def knows_all(self) -> bool:
        """Whether the bound left out no block, so that an unknown block is not in the pool."""
        return not self._truncated and len(self._listed) < self._max_blocks

    def is_current(self, number: int) -> bool:
        """Whether that list is still to be applied."""
        return number > self._last_applied

    def keys(self) -> list[bytes]:
        """All known blocks."""
        return list(self._held)

    def add(self, keys: Iterable[bytes]) -> None:
        """Record blocks that this node put or found."""
        there = list(keys)
        self._change(there, held=True)
        for key in there:
            self._removed.pop(key, None)
            if key in self._held and key not in self._listed:
                self._added[key] = self._last_requested

    def remove(self, keys: Iterable[bytes]) -> None:
        """Record blocks that this node removed or did not find."""
        gone = list(keys)
        on_its_way = self._last_requested > self._last_applied
        for key in gone:
            self._added.pop(key, None)
            if on_its_way or key in self._listed:
                self._removed[key] = self._last_requested
        self._change(gone, held=False)

    def record_miss(self, keys: Iterable[bytes]) -> None:
        """Record a lookup that did not find these blocks: known ones among them were evicted."""
        gone = [key for key in keys if key in self._held]
        now_ms = self._now_ms()
        self.eviction_stats.record_evicted(gone, now_ms=now_ms)
        self.eviction_stats.record_request(gone, now_ms=now_ms)

    def record_request(self, chain: Sequence[bytes]) -> None:
        """Record a request for the blocks of the chain, for the eviction statistics."""
        self.eviction_stats.record_request(chain, now_ms=self._now_ms())

    def clear(self) -> None:
        """Remove all blocks because the pool is unavailable. The next list must be a whole one."""
        self._last_applied, self._truncated = self._last_requested, False
        self._listed.clear()
        self._added.clear()
        self._removed.clear()
        self._change(list(self._held), held=False)

    def request_list(self) -> int:
        """Count a list request; returns its number, for `apply_list`."""
        self._last_requested += 1
        return self._last_requested

    def list_failed(self) -> None:
        """Record that the requested list does not arrive."""
        self._last_applied = self._last_requested
        self._removed = {key: asked for key, asked in self._removed.items() if key in self._listed}

    def apply_list(
        self,
        number: int,
        *,
        new: Collection[bytes],
        gone: Collection[bytes],
        whole: bool = False,
        last: bool = True,
    ) -> None:
        """Apply the differences of a list to the one before it.

        `whole`: this part begins a list of all values. `last`: no more parts follow.
        """
        self._last_applied = number
        if whole:
            self._listed.clear()
            self._added = {**dict.fromkeys(self._held, number - 1), **self._added}
        self._listed.update(new)
        self._listed.difference_update(gone)
        self._evict([key for key in gone if self._added.get(key, 0) < number])
        self._change([key for key in new if self._removed.get(key, 0) < number], held=True)
        if not last:
            return
        for key in [key for key, asked in self._added.items() if asked < number]:
            del self._added[key]
            if key not in self._listed:
                self._evict([key])
        for key in [key for key, asked in self._removed.items() if asked < number]:
            del self._removed[key]
            if key in self._listed:
                self._change([key], held=True)

    def _evict(self, keys: Collection[bytes]) -> None:
        self.eviction_stats.record_evicted((key for key in keys if key in self._held), now_ms=self._now_ms())
        self._change(keys, held=False)

    def _change(self, keys: Collection[bytes], *, held: bool) -> None:
        changed = [key for key in dict.fromkeys(keys) if (key in self._held) is not held]
        if held:
            room = max(0, self._max_blocks - len(self._held))
            self._truncated |= len(changed) > room
            changed = changed[:room]
            self._held.update(changed)
            self.eviction_stats.discard(changed)
        else:
            self._held.difference_update(changed)
        if changed:
            self.on_change(changed, held)

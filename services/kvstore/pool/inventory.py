"""What the pool holds, as far as a node knows. Pure.

Its own puts and questions tell a node of single blocks at once. The master's list of all values, asked for
every few seconds, tells it of what others put and of what was evicted: the pool's own calls cannot, as asking
after a block keeps it (of 140 blocks the 70 that were asked after stayed, the others were evicted).

A list says what there was when it was made: a block that this node has put, or not found, since it asked for
the list is as the node saw it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from services.kvstore.pool.eviction_stats import EvictionStats

# Of each pool, so many blocks are told of: 16 bytes each on the wire, about 200 in a router.
MAX_CONTENTS_BLOCKS = 262_144

OnChange = Callable[[Collection[bytes], bool], None]


def _ignore(keys: Collection[bytes], held: bool) -> None:
    return


class Inventory:
    """`on_change(keys, held)` hears of every change, once."""

    def __init__(
        self, *, max_blocks: int = MAX_CONTENTS_BLOCKS, now_ms: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._now_ms = now_ms
        self.evicted = EvictionStats()
        self.on_change: OnChange = _ignore
        self._max_blocks = max_blocks
        self._held: set[bytes] = set()
        self._listed: set[bytes] = set()
        self._seen: dict[bytes, int] = {}  # there, by our own eyes -> how many lists had been asked for then
        self._missed: dict[bytes, int] = {}  # not there, likewise
        self._asked = 0
        self._answered = 0  # the last list that is not awaited any more
        self._left_out = False  # something was there that the bound left out

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    @property
    def knows_all(self) -> bool:
        """Whether the bound left out nothing, so that what is not known is not there."""
        return not self._left_out and len(self._listed) < self._max_blocks

    def awaits(self, number: int) -> bool:
        """Whether that list still says something."""
        return number > self._answered

    def keys(self) -> list[bytes]:
        """All of them."""
        return list(self._held)

    def seen(self, keys: Iterable[bytes]) -> None:
        """These were put, or found."""
        there = list(keys)
        self._change(there, held=True)
        for key in there:
            self._missed.pop(key, None)
            if key in self._held and key not in self._listed:
                self._seen[key] = self._asked

    def missed(self, keys: Iterable[bytes]) -> None:
        """These were not found, or removed."""
        gone = list(keys)
        on_its_way = self._asked > self._answered
        for key in gone:
            self._seen.pop(key, None)
            if on_its_way or key in self._listed:
                self._missed[key] = self._asked
        self._change(gone, held=False)

    def evicted_and_wanted(self, keys: Iterable[bytes]) -> None:
        """Somebody wants these, and they were not found: of those that were thought to be there it is learnt
        now that they were evicted."""
        gone = [key for key in keys if key in self._held]
        now_ms = self._now_ms()
        self.evicted.left(gone, now_ms=now_ms)
        self.evicted.want(gone, now_ms=now_ms)

    def want(self, chain: Sequence[bytes]) -> None:
        """A request wanted the blocks of the chain."""
        self.evicted.want(chain, now_ms=self._now_ms())

    def clear(self) -> None:
        """The pool is away: it has nothing. The next list is to be a whole one."""
        self._answered, self._left_out = self._asked, False
        self._listed.clear()
        self._seen.clear()
        self._missed.clear()
        self._change(list(self._held), held=False)

    def ask(self) -> int:
        """A list is asked for; its number, for `listed`."""
        self._asked += 1
        return self._asked

    def unlisted(self) -> None:
        """The list that was asked for does not come."""
        self._answered = self._asked
        self._missed = {key: asked for key, asked in self._missed.items() if key in self._listed}

    def listed(
        self,
        number: int,
        *,
        new: Collection[bytes],
        gone: Collection[bytes],
        whole: bool = False,
        last: bool = True,
    ) -> None:
        """What the list has that the one before it had not, and the other way round. `whole`: this begins a
        list of all; `last`: there is no more of it."""
        self._answered = number
        if whole:
            self._listed.clear()
            self._seen = {**dict.fromkeys(self._held, number - 1), **self._seen}
        self._listed.update(new)
        self._listed.difference_update(gone)
        self._evict([key for key in gone if self._seen.get(key, 0) < number])
        self._change([key for key in new if self._missed.get(key, 0) < number], held=True)
        if not last:
            return
        for key in [key for key, asked in self._seen.items() if asked < number]:
            del self._seen[key]
            if key not in self._listed:
                self._evict([key])
        for key in [key for key, asked in self._missed.items() if asked < number]:
            del self._missed[key]
            if key in self._listed:
                self._change([key], held=True)

    def _evict(self, keys: Collection[bytes]) -> None:
        self.evicted.left((key for key in keys if key in self._held), now_ms=self._now_ms())
        self._change(keys, held=False)

    def _change(self, keys: Collection[bytes], *, held: bool) -> None:
        changed = [key for key in dict.fromkeys(keys) if (key in self._held) is not held]
        if held:
            room = max(0, self._max_blocks - len(self._held))
            self._left_out |= len(changed) > room
            changed = changed[:room]
            self._held.update(changed)
            self.evicted.forget(changed)
        else:
            self._held.difference_update(changed)
        if changed:
            self.on_change(changed, held)

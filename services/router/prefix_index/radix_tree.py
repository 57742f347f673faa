"""Runs below each other, found by the hash of any of their blocks: split, merged, cut and cleared away. Pure.

Where chains part a run is split, and what is left with one way to go on becomes one run again, so that the
runs hang only on which chains there are. Loose runs have no place in a chain: their blocks lie in any order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from services.router.prefix_index.expiry_queue import ExpiryQueue
from services.router.prefix_index.hash_table import KEY_BYTES, HashTable
from services.router.prefix_index.memory_budget import MemoryBudget
from services.router.prefix_index.radix_node import RadixNode, leading_ones
from slipstream.errors import Internal

# A block's number in the table: that of its run, and its own in its chain or its loose run.
_INDEX_BITS = 24
_INDEX = (1 << _INDEX_BITS) - 1
# Blocks that go together for want of room.
_LEAST_FORGOTTEN = 256
# To look at a run, or to clear one who is gone out of it, takes as long as to clear away so many blocks.
BLOCKS_A_RUN = 8


class RadixTree:
    """See the module's text. Whoever changes a run's claims says `changed` or, for less, `settle`."""

    def __init__(self, room: MemoryBudget) -> None:
        self._room = room
        self._table = HashTable()
        self._runs: dict[int, RadixNode] = {}  # by number
        self._numbers = itertools.count()
        self._due = ExpiryQueue()
        self.changes = 0  # of which blocks are in which runs
        self.forgotten_blocks = 0  # for want of room

    @property
    def blocks(self) -> int:
        """Different blocks that are known."""
        return len(self._table)

    @property
    def runs(self) -> int:
        """What they lie in."""
        return len(self._runs)

    # ---- finding and adding

    def find(self, key: bytes) -> tuple[RadixNode, int] | None:
        """A block's run, and the block's number in its chain, or among those of its loose run."""
        number = self._table.get(key)
        return None if number < 0 else (self._runs[number >> _INDEX_BITS], number & _INDEX)

    def knows(self, run: RadixNode) -> bool:
        """Whether the run is still one."""
        return self._runs.get(run.number) is run

    def add(self, tenant: str | None, *, parent: RadixNode | None = None, first_block: int = 0) -> RadixNode:
        """A new run without blocks."""
        run = RadixNode(next(self._numbers), tenant=tenant, parent=parent, first_block=first_block)
        self._runs[run.number] = run
        if parent is not None:
            parent.children[run.number] = run
        self._room.add(run)
        return run

    def extend(self, run: RadixNode, keys: bytes) -> list[tuple[int, RadixNode, int]]:
        """Blocks more, of which the caller says `changed`. Returns of each that lay elsewhere before its
        place among these, the run it was in, and its number there."""
        replaced = self._table.put_all(keys, run.number << _INDEX_BITS | run.end)
        run.keys += keys
        self.changes += 1
        return [(at, self._runs[number >> _INDEX_BITS], number & _INDEX) for at, number in replaced]

    def changed(self, run: RadixNode) -> None:
        """It takes more or less."""
        self._room.account(run)

    def unname(self, run: RadixNode, mask: int) -> None:
        """Of these blocks of a loose run those that nobody has are not known any more."""
        for bits in run.told.values():
            mask &= ~bits
        while mask:
            first = leading_ones(~mask)
            length = leading_ones(mask >> first)
            keys = run.keys[first * KEY_BYTES : (first + length) * KEY_BYTES]
            self._table.discard_all(keys, run.number << _INDEX_BITS | first)
            run.blank(first, length)
            mask &= mask + (1 << first)  # clears these, for the carry runs through them

    # ---- runs

    def split(self, run: RadixNode, n_blocks: int) -> None:
        """Makes two runs of one: the first `n_blocks` stay."""
        self.changes += 1
        end = self.add(run.tenant)
        run.give_end(end, n_blocks)
        end.children, run.children = run.children, {}
        for child in end.children.values():
            child.parent = end
        end.parent = run
        self._renumber(run, end)
        run.children[end.number] = end
        for part in (run, end):
            self._room.account(part)
            self._look_at_promises(part)

    def _merge(self, run: RadixNode, end: RadixNode) -> None:
        """One run of two, of which the second is all that follows the first."""
        self.changes += 1
        del run.children[end.number]
        self._renumber(run, end, merge=True)
        run.take_end(end)
        run.children = end.children
        for child in run.children.values():
            child.parent = run
        self._leave(end)
        self._room.account(run)
        self._look_at_promises(run)

    def _renumber(self, run: RadixNode, end: RadixNode, *, merge: bool = False) -> None:
        """The blocks of two runs that are, or will be (`merge`), one get their numbers. The longer one's have
        them already, and are not touched."""
        number, shorter = run.number, end
        if end.n_blocks > run.n_blocks:
            shorter = run
            if run.parent is not None:
                run.parent.children[end.number] = run.parent.children.pop(run.number)
            run.number, end.number = end.number, run.number
            self._runs[run.number], self._runs[end.number] = run, end
        number = run.number if merge else shorter.number
        self._table.put_all(shorter.keys, number << _INDEX_BITS | shorter.first_block)

    def settle(self, run: RadixNode | None, *, most_blocks: int = _INDEX) -> int:
        """Something is gone: what of it nobody has goes too, if it is an end, and of what it went on from;
        where one way is left to go on, it becomes one run. Returns how many blocks went."""
        n_gone = 0
        while run is not None:
            if run.children:
                (child, *others) = itertools.islice(run.children.values(), 2)
                if not others and child.tenant == run.tenant:
                    self._merge(run, child)
                else:
                    self._room.account(run)
                break
            wanted = run.wanted_blocks if run.tenant is not None or not run.told else run.n_blocks
            if run.n_blocks - wanted > most_blocks - n_gone:
                wanted = run.n_blocks - (most_blocks - n_gone)
                self.look_soon(run)
            n_gone += run.n_blocks - wanted
            run = self._cut(run, wanted)
        return n_gone

    def _cut(self, run: RadixNode, n_blocks: int) -> RadixNode | None:
        """Keep the first blocks of an end. Returns what became an end by that, if any."""
        if n_blocks:
            if n_blocks < run.n_blocks:
                self.changes += 1
                number = run.number << _INDEX_BITS | run.first_block + n_blocks
                self._table.discard_all(run.keys[n_blocks * KEY_BYTES :], number)
                run.keep_begin(n_blocks)
            self._room.account(run)
            return None
        self.changes += 1
        self._table.discard_all(run.keys, run.number << _INDEX_BITS | run.first_block)
        run.forget_all()
        self._leave(run)
        if run.parent is not None:
            del run.parent.children[run.number]
        return run.parent

    def _leave(self, run: RadixNode) -> None:
        self._room.leave(run)
        self._due.leave(run)
        del self._runs[run.number]

    # ---- time and room

    def tidy(self, now_s: float, *, most_blocks: int) -> int:
        """Clear away some of what is over; the rest the next time. Returns how much more might have gone."""
        while most_blocks > 0 and self._due.any(now_s):
            run = self._due.pop()
            run.forget_promises(now_s)
            if run.sent:
                self._look_at_promises(run)
            most_blocks -= BLOCKS_A_RUN + self.settle(run, most_blocks=most_blocks)
        return max(most_blocks, 0)

    def look_soon(self, run: RadixNode) -> None:
        """Somebody has it no more: `tidy` will see what is left."""
        self._due.soon(run)

    def promised(self, run: RadixNode, until_s: float) -> None:
        """Somebody was sent some of it: `tidy` will see what is left then, if not sooner."""
        self._room.account(run)
        self._due.no_later(run, until_s)

    def _look_at_promises(self, run: RadixNode) -> None:
        """When the last of them is over, or at the next chance if there is none."""
        self._due.leave(run)
        if run.sent:
            self._due.no_later(run, max([promised[-1][1] for promised in run.sent.values()]))
        else:
            self._due.soon(run)

    def make_room(self, grown: Iterable[RadixNode], tenant: str | None) -> None:
        """Forget what is beyond the bounds: of the tenants of runs that grew, of this one, and of all."""
        tenants = dict.fromkeys([run.tenant for run in grown])
        tenants[tenant] = None
        for of in tenants:
            while (run := self._room.victim(of)) is not None:
                kept = max(run.n_blocks - _LEAST_FORGOTTEN, 0)
                self.forgotten_blocks += run.n_blocks - kept
                end = self._cut(run, kept)
                self.settle(run if kept else end)  # perhaps nobody has what is left of it

    def check(self) -> None:
        """Raises Internal when the books contradict each other, or runs are not as long as they can be."""
        wrong: list[str] = []
        for number, run in self._runs.items():
            first = number << _INDEX_BITS | run.first_block
            named = [self._table.get(run.keys[i * KEY_BYTES :][:KEY_BYTES]) for i in range(run.n_blocks)]
            if run.tenant is not None and named != list(range(first, first + run.n_blocks)):
                wrong.append(f"run {number} is not found by its blocks")
            if run.number != number or not run.n_blocks or run.n_bytes != run.size():
                wrong.append(f"run {number} is not what it is taken for")
            if any(
                child.parent is not run or child.first_block != run.end for child in run.children.values()
            ):
                wrong.append(f"run {number} is not followed by its children")
            if len(run.children) == 1:
                wrong.append(f"run {number} goes on one way and ends")
            if any(run not in told.runs for told in run.told) or any(run not in s.runs for s in run.sent):
                wrong.append(f"somebody does not know of his blocks of run {number}")
            if max((bits.bit_length() for bits in run.told.values()), default=0) > run.n_blocks:
                wrong.append(f"somebody has more of run {number} than there is")
        if not all(self._due.holds(run) for run in self._runs.values()):
            wrong.append("a run that is to be looked at will not be")
        if len(self._due) != sum(run.due_s is not None for run in self._runs.values()):
            wrong.append("more is to be looked at than there is")
        if sum(run.n_bytes for run in self._runs.values()) != self._room.n_bytes:
            wrong.append("the bytes do not add up")
        if wrong:
            raise Internal("; ".join(wrong))

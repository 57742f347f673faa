"""Blocks of chains that somebody has or is about to have: a radix tree of runs below each tenant. Pure.

A block's hash names all blocks before it (docs/block-hash.md), so a chain is found by the last of its blocks
that is known, and a turn of a conversation adds its own blocks to the run that ends there. Holders tell of
blocks by their hashes alone: those that no prompt has named yet lie in loose runs, and move into the tree
when one does.

Memory is bounded for each tenant and in all; loose runs count as a tenant's. Where it is short the ends of
chains go, those of the run used least lately first: a run is used whenever one that goes on from it is. What
nobody has any more goes at once, or piece by piece where it is much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from libs.common import service_bounds
from services.router.prefix_index.hash_table import (
    KEY_BYTES,
    in_common,
    in_common_before,
    pack_keys,
    reversed_keys,
)
from services.router.prefix_index.memory_budget import MemoryBudget
from services.router.prefix_index.radix_node import ConfirmedBlocks, PredictedBlocks, RadixNode
from services.router.prefix_index.radix_tree import BLOCKS_A_RUN, RadixTree

_LOOSE_BLOCKS = 256  # of a loose run, at most
# A loose run of which not one block in so many is left gives way to one with what is left of others.
_LEAST_LEFT = 8
# Blocks that a request clears away of what is over, beyond twice those it brings.
_TIDIED_BLOCKS = 64


@dataclass(slots=True)
class ChainPath:
    """The first `blocks` of a chain as runs, each whole but the last. `ends`: the next block lies nowhere,
    not even in a loose run. Good until the forest changes."""

    runs: list[RadixNode] = field(default_factory=list)
    blocks: int = 0
    ends: bool = False


class RadixForest:
    """See the module's text. Not thread-safe."""

    def __init__(
        self,
        *,
        max_bytes: int = service_bounds.MAX_PREFIX_INDEX_BYTES,
        max_tenant_bytes: int = service_bounds.MAX_TENANT_PREFIX_INDEX_BYTES,
    ) -> None:
        self.room = MemoryBudget(max_bytes=max_bytes, max_tenant_bytes=max_tenant_bytes)
        self.trees = RadixTree(self.room)
        # Claims whose holders are gone, with runs to be cleared of them.
        self._gone: deque[ConfirmedBlocks | PredictedBlocks] = deque()
        self._gathered: RadixNode | None = None  # a loose run with what was left of others
        # What was found last: the hashes, how many there were, after how many changes.
        self._found: tuple[Sequence[bytes], int, int, ChainPath] = ((), 0, 0, ChainPath())

    # ---- chains

    def find(self, hashes: Sequence[bytes], *, tenant: str) -> ChainPath:
        """The beginning of a chain that is known: log2(n) probes, and what no prompt has named before."""
        path = self._known(hashes)
        n_known = path.blocks
        if not path.ends:
            while n_known < len(hashes) and self.trees.find(hashes[n_known][:KEY_BYTES]) is not None:
                n_known += 1
        if n_known > path.blocks:
            self._grow(path, hashes[:n_known], tenant)
            self.room.touch(path.runs, tenant)
            self._found = (hashes, len(hashes), self.trees.changes, path)
            self.trees.make_room(path.runs, tenant)
        else:
            self._found = (hashes, len(hashes), self.trees.changes, path)
        return path

    def promise(
        self, sent: PredictedBlocks, hashes: Sequence[bytes], *, tenant: str, now_s: float, until_s: float
    ) -> None:
        """The holder is about to have this chain. Costs its runs, and the blocks of it that are new."""
        path = self._known(hashes)
        fresh = len(hashes) - path.blocks
        if fresh:
            self._grow(path, hashes, tenant)
        for run in path.runs:
            run.promise(sent, min(run.n_blocks, path.blocks - run.first_block), now_s=now_s, until_s=until_s)
            self.trees.promised(run, until_s)
        self.room.touch(path.runs, tenant)
        self._found = (hashes, len(hashes), self.trees.changes, path)
        self.tidy(now_s, most_blocks=_TIDIED_BLOCKS + 2 * fresh)
        self.trees.make_room(path.runs, tenant)

    def _known(self, hashes: Sequence[bytes]) -> ChainPath:
        """The runs of a chain. A request asks, and then tells of the same chain once or twice."""
        same, length, changes, path = self._found
        if hashes is same and length == len(hashes) and changes == self.trees.changes:
            return path
        return self._look_up(hashes)

    def _look_up(self, hashes: Sequence[bytes]) -> ChainPath:
        low, high = 0, len(hashes)  # so many are known, from so many on none is
        last: RadixNode | None = None
        ends = False
        probe = high
        while low < high:
            found = self.trees.find(hashes[probe - 1][:KEY_BYTES])
            if found is not None and found[1] == probe - 1 and found[0].tenant is not None:
                low, last = probe, found[0]
            else:
                high, ends = probe - 1, found is None
            probe = (low + high + 1) // 2
        path = ChainPath([], low, ends)
        while last is not None:
            path.runs.append(last)
            last = last.parent
        path.runs.reverse()
        return path

    def _grow(self, path: ChainPath, hashes: Sequence[bytes], tenant: str) -> None:
        """Go on with the path to the end of these."""
        run = path.runs[-1] if path.runs else None
        if run is not None and path.blocks < run.end:
            self.trees.split(run, path.blocks - run.first_block)
        if run is None or run.children or run.tenant != tenant:
            run = self.trees.add(tenant, parent=run, first_block=path.blocks)
            path.runs.append(run)
        first = run.n_blocks
        loose = self.trees.extend(run, pack_keys(hashes[path.blocks :]))
        if loose:
            self._adopt(run, first, loose)
        path.blocks = len(hashes)

    def _adopt(self, run: RadixNode, first: int, loose: Iterable[tuple[int, RadixNode, int]]) -> None:
        """Some blocks of a run, counted from `first`, were loose: what was told of them moves."""
        pieces: list[tuple[RadixNode, int, int, int]] = []  # where from, to, and how many in a row
        for at, source, index in loose:
            if source.tenant is not None:
                continue  # a block whose key is another's: see block_table.py
            if pieces:
                last, from_, to, length = pieces[-1]
                if last is source and index - from_ == length == first + at - to:
                    pieces[-1] = (last, from_, to, length + 1)
                    continue
            pieces.append((source, index, first + at, 1))
        for source, from_, to, length in pieces:
            mask = ((1 << length) - 1) << from_
            for told, bits in list(source.told.items()):
                if bits & mask:
                    source.set_told(told, bits & ~mask)
                    run.set_told(told, run.told.get(told, 0) | (bits & mask) >> from_ << to)
            source.blank(from_, length)
        for source in {source.number: source for source, *_ in pieces}.values():
            self.trees.settle(source)
            self._gather(source)
        self.trees.changed(run)

    def _gather(self, source: RadixNode) -> None:
        """What is left of a loose run, where that is little, moves together with what is left of others."""
        left = 0
        for bits in source.told.values():
            left |= bits
        n_left = left.bit_count()
        if not left or n_left * _LEAST_LEFT > source.n_blocks or not self.trees.knows(source):
            return
        run = self._gathered
        if run is None or run is source or not self.trees.knows(run) or run.n_blocks + n_left > _LOOSE_BLOCKS:
            run = self._gathered = self.trees.add(None)
        first, keys = run.n_blocks, []
        while left:
            at = (left & -left).bit_length() - 1
            keys.append(source.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            left &= left - 1
        self._adopt(run, first, self.trees.extend(run, b"".join(keys)))

    # ---- what holders tell

    def stored(self, told: ConfirmedBlocks, hashes: Sequence[bytes]) -> None:
        """The holder has these now. Blocks in the order of their chain cost little more than one."""
        pieces, unknown = self._pieces(hashes)
        for run, mask in pieces.items():
            run.set_told(told, run.told.get(told, 0) | mask)
            self.trees.changed(run)
        while unknown:
            run = told.loose if told.loose is not None else self.trees.add(None)
            if run.n_blocks >= _LOOSE_BLOCKS or not self.trees.knows(run):
                run = self.trees.add(None)
            told.loose, first = run, run.n_blocks
            self.trees.extend(run, b"".join(unknown[: _LOOSE_BLOCKS - first]))
            del unknown[: _LOOSE_BLOCKS - first]
            run.set_told(told, run.told.get(told, 0) | (1 << run.n_blocks) - (1 << first))
            self.trees.changed(run)
        self.trees.make_room(pieces, None)

    def removed(self, told: ConfirmedBlocks, hashes: Sequence[bytes]) -> None:
        """The holder has these no longer."""
        pieces, _ = self._pieces(hashes)
        for run, mask in pieces.items():
            gone = run.told.get(told, 0) & mask
            run.set_told(told, run.told.get(told, 0) & ~gone)
            if run.tenant is None:
                self.trees.unname(run, gone)
        for run in pieces:
            if self.trees.knows(run):
                self.trees.settle(run)
                if run.tenant is None:
                    self._gather(run)

    def forget(self, claims: ConfirmedBlocks | PredictedBlocks) -> None:
        """The holder is gone: nobody asks for these any more. `tidy` clears them away, and what nobody else
        has."""
        self._gone.append(claims)

    def tidy(self, now_s: float, *, most_blocks: int) -> bool:
        """Clear away some of what is over; the rest the next time. Returns whether there may be more."""
        while left := self.trees.tidy(now_s, most_blocks=most_blocks):
            run = self._clear_one() if self._gone else None
            if run is None:
                return False
            self.trees.look_soon(run)
            most_blocks = left - BLOCKS_A_RUN
        return True

    def _clear_one(self) -> RadixNode | None:
        """One who is gone has nothing of this run any more."""
        while self._gone and not self._gone[0].runs:
            self._gone.popleft()
        if not self._gone:
            return None
        claims = self._gone[0]
        run = claims.runs.pop()
        if isinstance(claims, ConfirmedBlocks):
            run.set_told(claims, 0)
        else:
            run.set_sent(claims, ())
        self.trees.changed(run)
        return run

    def _pieces(self, hashes: Sequence[bytes]) -> tuple[dict[RadixNode, int], list[bytes]]:
        """Which blocks of which runs these are, as bits, and the keys of those that are not known."""
        pieces: dict[RadixNode, int] = {}
        unknown: dict[bytes, None] = {}
        keys, at = pack_keys(hashes), 0
        backwards = b""  # what is evicted comes like that
        while at < len(keys):
            key = keys[at : at + KEY_BYTES]
            found = self.trees.find(key)
            if found is None:
                unknown[key] = None
                at += KEY_BYTES
                continue
            run, first = found[0], found[1] - found[0].first_block
            length = in_common(keys, at, run.keys, first * KEY_BYTES)
            if length == 1 and first and at + KEY_BYTES < len(keys):
                backwards = backwards or reversed_keys(keys)
                length = in_common_before(backwards, len(keys) - at, run.keys, (first + 1) * KEY_BYTES)
                first -= length - 1
            pieces[run] = pieces.get(run, 0) | ((1 << length) - 1) << first
            at += length * KEY_BYTES
        return pieces, list(unknown)

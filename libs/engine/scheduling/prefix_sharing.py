"""Who computes a block that several running prompts need: one of them, and the others take it over. Pure.

Prompts with a common prefix that run at once would each compute it. Instead, of all whose next block is
the same, one leads and the others follow: in a follower's turn its leader is given the rows, so that what
it waits for comes at least as fast as if it computed it itself. There is nothing to undo when a leader
ends early: leaders are chosen anew for every step, from whoever is left.

After a common part a follower waits for the next step before it goes on. The leader is taken from the
largest family at every fork, so among n siblings this happens to no one more than 1 + log2(n) times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixWork:
    """A running prompt that has KV of `n_computed` tokens and could use others' blocks.

    `hashes` are those of its leading blocks that may be taken over; by their construction, equal hashes
    at a place mean equal tokens up to there.
    """

    seq_id: str
    arrival: int
    n_computed: int
    hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Following:
    """`leader` still has `n_tokens` to compute until the last block that both need is full."""

    leader: str
    n_tokens: int


def find_followers(work: Sequence[PrefixWork], *, block_tokens: int) -> dict[str, Following]:
    """Whom each sequence waits for in this step. Leaders wait for nobody and are not in the answer."""
    followers: dict[str, Following] = {}
    for siblings in _by_block((w, w.n_computed // block_tokens) for w in work).values():
        if len(siblings) < 2:
            continue
        leader = _leader(siblings)
        for w in siblings:
            if w is not leader:
                n_blocks = common_blocks(leader.hashes, w.hashes)
                followers[w.seq_id] = Following(leader.seq_id, n_blocks * block_tokens - leader.n_computed)
    return followers


def common_blocks(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """How many leading blocks two chains have in common; O(log n), because equal hashes have equal pasts."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _leader(siblings: Sequence[PrefixWork]) -> PrefixWork:
    """One that has most of the next block; of several, one of those that stay together longest."""
    most = max(w.n_computed for w in siblings)
    family = [w for w in siblings if w.n_computed == most]
    while len(family) > 1:
        fork = min(common_blocks(family[0].hashes, w.hashes) for w in family[1:])
        branches = _by_block((w, fork) for w in family)
        if not branches:  # nobody has more to share
            break
        family = max(branches.values(), key=lambda branch: (len(branch), -min(w.arrival for w in branch)))
    return min(family, key=lambda w: w.arrival)


def _by_block(work: Iterable[tuple[PrefixWork, int]]) -> dict[bytes, list[PrefixWork]]:
    """Those that need the same block at a place of their chains; without those whose chain is shorter."""
    found: dict[bytes, list[PrefixWork]] = {}
    for w, place in work:
        if place < len(w.hashes):
            found.setdefault(w.hashes[place], []).append(w)
    return found

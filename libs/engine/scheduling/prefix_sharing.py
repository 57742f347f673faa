"""Choose one of several running prompts to compute a block that all of them need. Pure.

Without this, running prompts with a common prefix would each compute it. Of all prompts whose next block is
the same, one leads and the others follow. The scheduler gives a follower's rows to its leader, so the block
is ready at least as soon as if the follower computed it. Leaders are chosen for each step from the running
prompts, so a leader that ends early leaves nothing to undo.

After the common part, a follower continues in the next step. At every fork the leader comes from the largest
group, so each of n siblings waits for at most 1 + log2(n) such steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixWork:
    """A running prompt that has KV of `n_computed` tokens and can copy blocks of others.

    `hashes` name its leading blocks that may be copied. Equal hashes at one index mean
    equal tokens up to there.
    """

    seq_id: str
    arrival: int
    n_computed: int
    hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Following:
    """`leader` has `n_tokens` left to compute until the last block that both need is full."""

    leader: str
    n_tokens: int


def find_followers(work: Sequence[PrefixWork], *, block_tokens: int) -> dict[str, Following]:
    """Map each waiting sequence to the one that computes its prefix; the others are omitted."""
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
    """Number of leading blocks that two chains share. O(log n): a chain hash covers all blocks before it."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _leader(siblings: Sequence[PrefixWork]) -> PrefixWork:
    """The sibling with the most tokens of the next block; of equals, one with the longest common prefix."""
    most = max(w.n_computed for w in siblings)
    family = [w for w in siblings if w.n_computed == most]
    while len(family) > 1:
        fork = min(common_blocks(family[0].hashes, w.hashes) for w in family[1:])
        branches = _by_block((w, fork) for w in family)
        if not branches:  # all chains end at the fork
            break
        family = max(branches.values(), key=lambda branch: (len(branch), -min(w.arrival for w in branch)))
    return min(family, key=lambda w: w.arrival)


def _by_block(work: Iterable[tuple[PrefixWork, int]]) -> dict[bytes, list[PrefixWork]]:
    """Group prompts by the block at the given index of their chains; shorter chains are left out."""
    found: dict[bytes, list[PrefixWork]] = {}
    for w, place in work:
        if place < len(w.hashes):
            found.setdefault(w.hashes[place], []).append(w)
    return found

"""Blocks without the one before them: which are due, in which order, and how many at once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from services.kvstore.unreachable.watch import DROP_BLOCKS, GRACE_S, INHERIT_S, UnreachableWatch

KEYS = [bytes([number]) * 16 for number in range(8)]
MANY = [number.to_bytes(16, "big") for number in range(1, 3 * DROP_BLOCKS)]


@dataclass
class Tier:
    """A tier with these blocks. `is_read`: its blocks count as usable, as those `elsewhere` do."""

    present: set[bytes]
    elsewhere: set[bytes] = field(default_factory=set)
    spared: set[bytes] = field(default_factory=set)
    is_read: bool = True

    def is_present(self, key: bytes) -> bool:
        return key in self.present

    def is_usable(self, key: bytes) -> bool:
        return (self.is_read and key in self.present) or key in self.elsewhere

    def is_spared(self, key: bytes) -> bool:
        return key in self.spared


def test_a_copy_whose_predecessor_stays_lost_is_dropped_after_the_grace_time() -> None:
    pooled, elsewhere = set(KEYS[:5]), set[bytes]()
    watch = UnreachableWatch(Tier(present=pooled, elsewhere=elsewhere))
    for before, key in itertools.pairwise(KEYS[:5]):
        watch.put(key, before)
    assert watch.poll(now_s=0) == []
    pooled.discard(KEYS[1])  # evicted, as the pool knows no chains
    assert watch.poll(now_s=1) == []
    assert watch.blocks == 1
    assert watch.poll(now_s=1 + GRACE_S) == [KEYS[2]]
    elsewhere.add(KEYS[1])  # this node has the block, and may put it again
    assert watch.poll(now_s=2 + GRACE_S) == []
    assert watch.blocks == 0
    elsewhere.clear()
    watch.poll(now_s=100)
    assert watch.poll(now_s=100 + GRACE_S - 1) == []  # the grace time begins again
    (due,) = watch.poll(now_s=100 + GRACE_S)
    pooled.discard(due)
    watch.dropped([due], now_s=100 + GRACE_S)
    assert watch.dropped_blocks == 1
    assert watch.poll(now_s=101 + GRACE_S) == [KEYS[3]]  # its successor, whose grace time is over too


def test_unreachable_blocks_are_dropped_at_a_bounded_rate() -> None:
    keys = [number.to_bytes(16, "big") for number in range(1, 3 * DROP_BLOCKS)]
    watch = UnreachableWatch(Tier(present=set(keys), is_read=False))
    for key in keys:
        watch.put(key, bytes(16))
    watch.poll(now_s=0)
    assert watch.blocks == len(keys)
    assert len(watch.poll(now_s=GRACE_S)) == DROP_BLOCKS


def test_what_is_spared_keeps_nothing_else_waiting() -> None:
    watch = UnreachableWatch(Tier(present=set(MANY), is_read=False, spared=set(MANY[1:])))
    for key in MANY:
        watch.put(key, bytes(16))
    watch.poll(now_s=0)
    assert watch.poll(now_s=GRACE_S) == MANY[:1]


def test_each_look_returns_other_blocks_of_many() -> None:
    there = set(MANY)
    watch = UnreachableWatch(Tier(present=there, is_read=False))
    for key in MANY:
        watch.put(key, bytes(16))
    watch.poll(now_s=0)
    for second in range(3):
        due = watch.poll(now_s=GRACE_S + second)
        assert there.issuperset(due)
        there.difference_update(due)
        watch.dropped(due, now_s=GRACE_S + second)
    assert not there and watch.dropped_blocks == len(MANY) and watch.blocks == 0


def test_a_chain_that_is_put_again_has_a_new_grace_time() -> None:
    """Though blocks of the same names were dropped as unreachable before."""
    for put_again, later_s in ((True, 1.0), (False, INHERIT_S + 1)):
        there = set(KEYS[1:3])
        watch = UnreachableWatch(Tier(present=there), reports_losses=True)
        watch.put(KEYS[1], KEYS[0])
        watch.poll(now_s=0)
        assert watch.poll(now_s=GRACE_S) == [KEYS[1]]
        there.discard(KEYS[1])
        watch.dropped([KEYS[1]], now_s=GRACE_S)
        there.update(KEYS[:3])
        if put_again:  # otherwise the watch is not informed of the put
            watch.put(KEYS[1], KEYS[0])
        watch.poll(now_s=GRACE_S + later_s)
        there.discard(KEYS[1])
        watch.put(KEYS[2], KEYS[1])
        assert watch.poll(now_s=GRACE_S + later_s) == []
        assert watch.poll(now_s=2 * GRACE_S + later_s) == [KEYS[2]]

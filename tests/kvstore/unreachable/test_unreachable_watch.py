"""Blocks without the one before them: which are due, in which order, and how many at once."""

from __future__ import annotations

import itertools

from services.kvstore.unreachable.watch import DROP_BLOCKS, GRACE_S, INHERIT_S, UnreachableWatch

KEYS = [bytes([number]) * 16 for number in range(8)]
MANY = [number.to_bytes(16, "big") for number in range(1, 3 * DROP_BLOCKS)]


def test_a_copy_whose_predecessor_stays_away_is_an_orphan_and_due_after_a_while() -> None:
    pooled, elsewhere = set(KEYS[:5]), set[bytes]()
    orphans = UnreachableWatch(
        is_present=pooled.__contains__, is_usable=lambda key: key in pooled or key in elsewhere
    )
    for before, key in itertools.pairwise(KEYS[:5]):
        orphans.put(key, before)
    assert orphans.look(now_s=0) == []
    pooled.discard(KEYS[1])  # evicted, as the pool knows no chains
    assert orphans.look(now_s=1) == []
    assert orphans.blocks == 1
    assert orphans.look(now_s=1 + GRACE_S) == [KEYS[2]]
    elsewhere.add(KEYS[1])  # this node has the block, and may put it again
    assert orphans.look(now_s=2 + GRACE_S) == []
    assert orphans.blocks == 0
    elsewhere.clear()
    orphans.look(now_s=100)
    assert orphans.look(now_s=100 + GRACE_S - 1) == []  # counted anew
    (due,) = orphans.look(now_s=100 + GRACE_S)
    pooled.discard(due)
    orphans.dropped([due], now_s=100 + GRACE_S)
    assert orphans.dropped_blocks == 1
    assert orphans.look(now_s=101 + GRACE_S) == [KEYS[3]]  # what came after it, which had the same patience


def test_orphans_are_dropped_at_a_bounded_rate() -> None:
    keys = [number.to_bytes(16, "big") for number in range(1, 3 * DROP_BLOCKS)]
    orphans = UnreachableWatch(is_present=lambda key: True, is_usable=lambda key: False)
    for key in keys:
        orphans.put(key, bytes(16))
    orphans.look(now_s=0)
    assert orphans.blocks == len(keys)
    assert len(orphans.look(now_s=GRACE_S)) == DROP_BLOCKS


def test_what_is_spared_keeps_nothing_else_waiting() -> None:
    orphans = UnreachableWatch(
        is_present=lambda key: True,
        is_usable=lambda key: False,
        is_spared=lambda key: key != MANY[0],
    )
    for key in MANY:
        orphans.put(key, bytes(16))
    orphans.look(now_s=0)
    assert orphans.look(now_s=GRACE_S) == MANY[:1]


def test_of_many_orphans_each_look_gives_others() -> None:
    there = set(MANY)
    orphans = UnreachableWatch(is_present=there.__contains__, is_usable=lambda key: False)
    for key in MANY:
        orphans.put(key, bytes(16))
    orphans.look(now_s=0)
    for second in range(3):
        due = orphans.look(now_s=GRACE_S + second)
        assert there.issuperset(due)
        there.difference_update(due)
        orphans.dropped(due, now_s=GRACE_S + second)
    assert not there and orphans.dropped_blocks == len(MANY) and orphans.blocks == 0


def test_a_chain_that_is_put_anew_has_patience_of_its_own() -> None:
    """Though blocks of the same names were dropped as orphans once."""
    for put_again, later_s in ((True, 1.0), (False, INHERIT_S + 1)):
        there = set(KEYS[1:3])
        orphans = UnreachableWatch(
            is_present=there.__contains__, is_usable=there.__contains__, reports_losses=True
        )
        orphans.put(KEYS[1], KEYS[0])
        orphans.look(now_s=0)
        assert orphans.look(now_s=GRACE_S) == [KEYS[1]]
        there.discard(KEYS[1])
        orphans.dropped([KEYS[1]], now_s=GRACE_S)
        there.update(KEYS[:3])
        if put_again:  # as far as this was told
            orphans.put(KEYS[1], KEYS[0])
        orphans.look(now_s=GRACE_S + later_s)
        there.discard(KEYS[1])
        orphans.put(KEYS[2], KEYS[1])
        assert orphans.look(now_s=GRACE_S + later_s) == []
        assert orphans.look(now_s=2 * GRACE_S + later_s) == [KEYS[2]]

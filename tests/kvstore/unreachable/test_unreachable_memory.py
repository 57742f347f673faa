"""Blocks that the live policy does not hold and whose chain is cut before them: found, dropped, counted."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cache.policy import Production
from bench.cache.traces import LOADS
from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.dram.slots import SlotTable
from services.kvstore.unreachable.memory import LOOK_BLOCKS, MemorySweep
from tests.support.examples import examples


def rig(capacity: int) -> tuple[Production, MemorySweep]:
    production = Production(capacity)
    dram: Any = SimpleNamespace(table=production.table)
    return production, MemorySweep(dram, is_held=lambda key: production.table.get(key) is not None)


def unreachable_of(table: SlotTable[Any], parents: dict[bytes, bytes]) -> set[bytes]:
    held = set(table.keys())
    return {key for key in held if key in parents and parents[key] not in held}


@settings(max_examples=examples(8), deadline=None)
@given(
    seed=st.integers(0, 10_000), name=st.sampled_from(["agents", "betrayal"]), capacity=st.integers(20, 200)
)
def test_after_changes_of_the_policy_no_unreachable_block_stays_and_no_other_goes(
    seed: int, name: str, capacity: int
) -> None:
    production, sweep = rig(capacity)
    table, parents = production.table, dict[bytes, bytes]()
    rng = random.Random(seed)
    for number, chain in enumerate(LOADS[name](random.Random(seed), 400, capacity)):
        keys = [block.to_bytes(16, "little") for block in chain]
        parents.update(zip(keys[1:], keys, strict=False))
        production.serve(chain)
        policy = table.policy(PAGE_BYTES)
        if number % 100 == 99:
            policy.fix_policy(rng.randrange(4))
        if number % 20 == 19:
            before, cut_off = set(table.keys()), unreachable_of(table, parents)
            whole_round = 3 + len(policy.history) // LOOK_BLOCKS  # a drop may leave others behind it
            while any([sweep.sweep() for _ in range(whole_round)]):
                pass
            gone = before - set(table.keys())
            for key in gone:  # each was unreachable, or came after one that was
                assert key in cut_off or parents[key] in gone
            for key in unreachable_of(table, parents):  # left are those that the live policy holds
                assert policy.history.get(key) in policy.live
            table.check()


def cut_chain() -> tuple[Production, MemorySweep, list[bytes], list[bytes]]:
    """A chain that the live policy does not hold any more, the first of whose blocks is gone; and another."""
    production, sweep = rig(8)
    production.serve(range(100, 108))
    table = production.table
    policy = table.policy(PAGE_BYTES)
    policy.fix_policy(0)  # LRU, so that the next chain takes the place of this one
    cut, kept = (
        [number.to_bytes(16, "little") for number in range(start, start + 8)] for start in (100, 200)
    )
    policy.want(kept)
    policy.offer(kept)  # the live policy would rather have these
    assert not any(policy.history.get(key) in policy.live for key in cut)
    first = table.get(cut[0])
    assert first is not None
    table.drop(first)
    return production, sweep, cut, kept


def test_a_pinned_block_stays_and_is_counted() -> None:
    production, sweep, cut, _ = cut_chain()
    table = production.table
    held = table.get(cut[3])
    assert held is not None
    table.hold(held)
    for _ in range(4):
        sweep.sweep()
    assert table.keys() == [cut[3]]
    assert sweep.blocks == 1
    assert sweep.dropped_blocks == 6
    table.unhold(held)
    for _ in range(4):
        sweep.sweep()
    assert table.keys() == []
    assert (sweep.blocks, sweep.dropped_blocks) == (0, 7)


def test_a_block_whose_predecessor_is_in_another_tier_is_reachable() -> None:
    production, _, cut, _ = cut_chain()
    dram: Any = SimpleNamespace(table=production.table)
    elsewhere = {cut[0]}
    sweep = MemorySweep(dram, is_held=lambda key: key in elsewhere or production.table.get(key) is not None)
    for _ in range(4):
        assert sweep.sweep() == 0
    assert production.table.keys() == cut[1:]
    elsewhere.clear()
    sweep.sweep()
    sweep.sweep()
    assert production.table.keys() == []


def test_a_block_of_the_live_policy_stays_when_its_chain_is_cut() -> None:
    """The next turn puts the lost first block again, and has the whole chain."""
    production, sweep = rig(16)
    production.serve(range(100, 108))
    table = production.table
    first = table.get((100).to_bytes(16, "little"))
    assert first is not None
    table.drop(first)
    for _ in range(4):
        assert sweep.sweep() == 0
    assert len(table.keys()) == 7


def test_one_look_visits_a_bounded_number_of_blocks() -> None:
    production, sweep = rig(64)
    policy = production.table.policy(PAGE_BYTES)
    for number in range(2 * LOOK_BLOCKS):
        policy.want([number.to_bytes(16, "big")])
    sweep.sweep()
    left = next(iter(sweep._rounds.values()))._left
    n_left = len(left)
    sweep.sweep()
    assert n_left - len(left) == LOOK_BLOCKS

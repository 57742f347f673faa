"""Blocks that the leader does not count and whose chain is cut before them: found, dropped, counted."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cache.policy import Production
from bench.cache.traces import LOADS
from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.dram.orphans import RUNS_AT_ONCE, DramOrphans
from services.kvstore.dram.slots import SlotTable
from services.kvstore.policy.runs import Run


def rig(capacity: int) -> tuple[Production, DramOrphans]:
    production = Production(capacity)
    dram: Any = SimpleNamespace(table=production.table)
    return production, DramOrphans(dram, is_held=lambda key: production.table.get(key) is not None)


def orphans_of(table: SlotTable[Any], parents: dict[bytes, bytes]) -> set[bytes]:
    held = set(table.keys())
    return {key for key in held if key in parents and parents[key] not in held}


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000), name=st.sampled_from(["agents", "betrayal"]), capacity=st.integers(20, 200)
)
def test_after_changes_of_the_leader_no_orphan_stays_and_no_other_block_goes(
    seed: int, name: str, capacity: int
) -> None:
    production, orphans = rig(capacity)
    table, parents = production.table, dict[bytes, bytes]()
    for number, chain in enumerate(LOADS[name](random.Random(seed), 400, capacity)):
        keys = [block.to_bytes(16, "little") for block in chain]
        parents.update(zip(keys[1:], keys, strict=False))
        production.serve(chain)
        policy = table.policy(PAGE_BYTES)
        if number % 100 == 99:
            policy.lead(by_reuse=not policy.by_reuse)
        if number % 20 == 19:
            before, cut_off = set(table.keys()), orphans_of(table, parents)
            whole_round = 3 + len(policy.tree) // RUNS_AT_ONCE  # an orphan may leave others behind it
            while any([orphans.look() for _ in range(whole_round)]):
                pass
            gone = before - set(table.keys())
            for key in gone:  # each was an orphan, or came after one that was
                assert key in cut_off or parents[key] in gone
            for key in orphans_of(
                table, parents
            ):  # left are those that the leader would have with their chain
                run = policy.tree.get(key)
                assert run is not None
                assert run.keys.index(key) < policy.leader.count(run)
            table.check()


def cut_chain() -> tuple[Production, DramOrphans, list[bytes], list[bytes]]:
    """A chain that the leader does not count any more, the first of whose blocks is gone; and another."""
    production, orphans = rig(8)
    production.serve(range(100, 108))
    table = production.table
    policy = table.policy(PAGE_BYTES)
    cut, kept = (
        [number.to_bytes(16, "little") for number in range(start, start + 8)] for start in (100, 200)
    )
    policy.want(kept)
    policy.offer(kept)  # the leader would rather have these
    assert all(
        policy.leader.count(run) == 0 for run in {policy.tree.get(key) for key in cut} if run is not None
    )
    first = table.get(cut[0])
    assert first is not None
    table.drop(first)
    return production, orphans, cut, kept


def test_what_somebody_holds_stays_and_is_counted() -> None:
    production, orphans, cut, _ = cut_chain()
    table = production.table
    held = table.get(cut[3])
    assert held is not None
    table.hold(held)
    for _ in range(4):
        orphans.look()
    assert table.keys() == [cut[3]]
    assert orphans.blocks == 1
    assert orphans.dropped_blocks == 6
    table.unhold(held)
    for _ in range(4):
        orphans.look()
    assert table.keys() == []
    assert (orphans.blocks, orphans.dropped_blocks) == (0, 7)


def test_a_block_whose_predecessor_is_in_another_tier_is_no_orphan() -> None:
    production, _, cut, _ = cut_chain()
    dram: Any = SimpleNamespace(table=production.table)
    elsewhere = {cut[0]}
    orphans = DramOrphans(dram, is_held=lambda key: key in elsewhere or production.table.get(key) is not None)
    for _ in range(4):
        assert orphans.look() == 0
    assert production.table.keys() == cut[1:]
    elsewhere.clear()
    orphans.look()
    orphans.look()
    assert production.table.keys() == []


def test_what_the_leader_counts_stays_though_its_chain_is_cut() -> None:
    """Who has lost the first block puts it again with the next turn, and has the whole chain."""
    production, orphans = rig(16)
    production.serve(range(100, 108))
    table = production.table
    first = table.get((100).to_bytes(16, "little"))
    assert first is not None
    table.drop(first)
    for _ in range(4):
        assert orphans.look() == 0
    assert len(table.keys()) == 7


def test_a_look_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    production, orphans = rig(64)
    for number in range(3 * RUNS_AT_ONCE):
        production.table.policy(PAGE_BYTES).want([number.to_bytes(16, "big")])
    looked = []
    leader = production.table.policy(PAGE_BYTES).leader
    count = leader.count

    def noted(run: Run) -> int:
        looked.append(run)
        return count(run)

    monkeypatch.setattr(leader, "count", noted)
    orphans.look()
    orphans.look()
    assert 0 < len(looked) <= RUNS_AT_ONCE

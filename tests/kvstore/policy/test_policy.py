"""The eviction policy: capacity, pins, whole chains, determinism, what it learns, what it never loses."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.cache.baselines import Lru
from bench.cache.policy import Production
from bench.cache.traces import LOADS, Chain
from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.dram.slots import Block, SlotTable
from services.kvstore.policy.eviction import EvictionPolicy

REQUESTS = 600
# What the duel may cost: its first stakes, and what a change of leader costs.
LOST_BLOCKS = 128


def hits_of(cache: Production | Lru, chains: Sequence[Chain]) -> int:
    return sum(cache.serve(chain) for chain in chains)


@pytest.mark.parametrize("name", LOADS)
def test_hits_are_never_fewer_than_those_of_lru_but_for_what_the_duel_stakes(name: str) -> None:
    for capacity in (16, 128):
        chains = LOADS[name](random.Random(capacity), REQUESTS, capacity)
        ours, lru = hits_of(Production(capacity), chains), hits_of(Lru(capacity), chains)
        assert ours >= lru - LOST_BLOCKS, (name, capacity)


@pytest.mark.parametrize(("name", "blocks"), [("loop", 600), ("zipf", 50), ("floods", 50)])
def test_more_than_lru_where_there_is_something_to_learn(name: str, blocks: int) -> None:
    chains = LOADS[name](random.Random(1), 2000, 64)
    assert hits_of(Production(64), chains) >= hits_of(Lru(64), chains) + blocks


def test_the_simulated_lru_is_lru() -> None:
    chains = LOADS["agents"](random.Random(5), REQUESTS, 64)
    production = Production(64)
    hits_of(production, chains)
    assert production.table.policy(PAGE_BYTES).duel.lru_hits == hits_of(Lru(64), chains)


@settings(max_examples=8, deadline=None)
@example(seed=842, name="agents", capacity=111)
@given(
    seed=st.integers(0, 10_000), name=st.sampled_from(["agents", "shifting"]), capacity=st.integers(4, 200)
)
def test_what_is_held_is_usable_counted_and_the_same_in_every_run(
    seed: int, name: str, capacity: int
) -> None:
    chains = LOADS[name](random.Random(seed), 250, capacity)
    tables = []
    for _ in range(2):
        production = Production(capacity)
        parents: dict[bytes, bytes] = {}
        for chain in chains:
            production.serve(chain)
            keys = [block.to_bytes(16, "little") for block in chain]
            parents.update(zip(keys[1:], keys, strict=False))
            table = production.table
            assert table.n_blocks <= capacity
        table.check()
        held, policy = set(table.keys()), table.policy(PAGE_BYTES)
        for key in held:
            if key in parents and parents[key] not in held:  # after a change of the leader: it is to go
                run = policy.tree.get(key)
                assert run is not None
                assert policy.leader.count(run) <= run.keys.index(key)
        for run in policy.tree.oldest():
            if run.parent is not None and run.kept:
                assert run.parent.kept == len(run.parent.keys)
        tables.append(table.keys())
    assert tables[0] == tables[1]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), by_reuse=st.booleans())
def test_pinned_blocks_stay_whoever_leads(seed: int, by_reuse: bool) -> None:
    rng = random.Random(seed)
    table: SlotTable[None] = SlotTable(n_slabs=1, slab_bytes=24 * PAGE_BYTES)
    policy = table.policy(PAGE_BYTES)
    policy.lead(by_reuse=by_reuse)
    pinned: list[Block[None]] = []
    for number, chain in enumerate(LOADS["agents"](rng, 120, 24)):
        keys = [block.to_bytes(16, "little") for block in chain]
        table.touch(keys)
        for key in table.offer([key for key in keys if table.get(key) is None], PAGE_BYTES):
            slot = table.allocate(PAGE_BYTES)
            if slot is not None:
                table.publish(key, slot, PAGE_BYTES, None)
        block = table.get(rng.choice(keys))
        if block is not None and rng.random() < 0.5:
            table.hold(block)
            pinned.append(block)
        if pinned and rng.random() < 0.45:
            table.unhold(pinned.pop(rng.randrange(len(pinned))))
        if number % 40 == 0:
            policy.lead(by_reuse=not by_reuse)
        assert all(table.get(block.key) is block for block in pinned)
        table.check()
    for block in pinned:
        table.unhold(block)
    room = [table.allocate(PAGE_BYTES) for _ in range(24)]  # nothing is out of the policy's reach
    assert None not in room


def test_what_is_forgotten_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvstore.policy.eviction.MIN_REMEMBERED_BLOCKS", 500)
    production = Production(50)
    hits_of(production, LOADS["scans"](random.Random(3), 4000, 50))
    policy = production.table.policy(PAGE_BYTES)
    assert len(policy.tree) < 500 + 100 + 4096
    assert len(policy.tree.columns.runs) <= 3 * len(policy.tree)
    policy.check()


def test_a_chain_longer_than_the_tier_keeps_its_start() -> None:
    present: set[bytes] = set()
    policy = EvictionPolicy(8, is_present=present.__contains__)
    chain = [number.to_bytes(16) for number in range(20)]
    policy.want(chain)
    kept = policy.offer(chain)
    assert kept == chain[:8]

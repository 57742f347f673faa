"""Eviction of a full disk: ends of chains first, by the adaptive policy, tenants within their share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cache.baselines import Lru
from bench.cache.disk import DiskCache
from bench.cache.traces import LOADS
from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.disk.table.policy import NO_KIND, BlockOrigin
from services.kvstore.disk.table.table import DiskTable
from services.kvstore.dram.slots import Slot
from services.kvstore.policy.quota import NO_TENANT
from tests.kvstore.disk.table_check import check_table
from tests.support.examples import examples

# How many hits the adaptive policy may lose to LRU before its samples suffice and by changes.
LOST_BLOCKS = 128


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


@pytest.mark.parametrize("name", LOADS)
def test_hits_are_at_least_those_of_lru_but_for_a_bounded_loss(name: str) -> None:
    capacity = 64
    chains = LOADS[name](random.Random(capacity), 250, capacity)
    disk, lru = DiskCache(capacity), Lru(capacity)
    ours, theirs = sum(map(disk.serve, chains)), sum(map(lru.serve, chains))
    assert ours >= theirs - LOST_BLOCKS
    check_table(disk.table)


def test_a_loop_gets_more_hits_than_with_lru() -> None:
    chains = LOADS["loop"](random.Random(1), 2000, 64)
    disk, lru = DiskCache(64), Lru(64)
    assert sum(map(disk.serve, chains)) >= sum(map(lru.serve, chains)) + 200


def test_a_policy_that_samples_a_quarter_of_the_blocks_still_beats_lru(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LRU has no hits in a loop larger than the disk; sampled blocks show that another policy has."""
    monkeypatch.setattr("services.kvstore.disk.table.block_use.SAMPLED_BLOCKS", 128)
    chains = LOADS["loop"](random.Random(2), 6000, 512)
    disk = DiskCache(512)
    hits = sum(map(disk.serve, chains))
    policy = disk.table.policy
    assert policy is not None and policy.rate == 4
    assert hits > 0.2 * sum(map(len, chains))
    assert policy.rewanted[0] > 0
    check_table(disk.table)


@settings(max_examples=examples(8), deadline=None)
@given(seed=st.integers(0, 1 << 20), share=st.sampled_from([0.3, 0.6, 1.0]))
def test_any_order_of_calls_keeps_the_table_consistent_and_tenants_within_their_share(
    seed: int, share: float
) -> None:
    rng = random.Random(seed)
    table = DiskTable(n_slabs=4, slab_bytes=16 * PAGE_BYTES, tenant_share=share)
    limit, tenants = int(64 * PAGE_BYTES * share), [NO_TENANT, b"a", b"b"]
    writing: list[tuple[int, Slot, BlockOrigin]] = []
    held = []
    for generation in range(1, 150):
        tenant, start = rng.choice(tenants), rng.randrange(50)
        chain = [key(n) for n in range(start, start + rng.randrange(1, 8))]
        rng.shuffle(chain) if rng.random() < 0.2 else None  # a caller may pass any order
        table.touch(chain, tenant=tenant)
        number = rng.randrange(60)
        if not table.contains(key(number)) and number not in [each[0] for each in writing]:
            slot = table.allocate(PAGE_BYTES * rng.choice((1, 1, 1, 3)), generation=generation, tenant=tenant)
            parent = key(rng.randrange(60)) if rng.random() < 0.8 else None
            if slot is not None:
                writing.append((number, slot, BlockOrigin(parent, rng.randrange(8), NO_KIND, tenant)))
        if writing and rng.random() < 0.8:
            number, slot, origin = writing.pop(rng.randrange(len(writing)))
            if rng.random() < 0.9:
                table.publish(key(number), slot, slot.slot_bytes, generation, bytes(16), origin)
            else:
                table.free(slot)
        block = table.get(key(rng.randrange(60)))
        if block is not None and rng.random() < 0.4:
            table.hold(block)
            held.append(block)
        elif block is not None and rng.random() < 0.2:
            table.drop(block)
        if held and rng.random() < 0.6:
            table.unhold(held.pop())
        check_table(table)
        if table.quota is not None:
            assert all(table.quota.used_bytes(table.quota.number_of(name)) <= limit for name in (b"a", b"b"))


def test_a_tenant_at_its_limit_evicts_its_own_blocks_and_shared_blocks_are_not_counted() -> None:
    table = DiskTable(n_slabs=1, slab_bytes=20 * PAGE_BYTES, tenant_share=0.3)  # ten slots, three of them

    def put(number: int, tenant: bytes) -> bool:
        slot = table.allocate(PAGE_BYTES, generation=0, tenant=tenant)
        if slot is not None:
            table.publish(key(number), slot, PAGE_BYTES, number + 1, bytes(16))
        return slot is not None

    assert put(100, b"b")
    assert all(put(number, b"a") for number in range(6))
    assert sorted(int.from_bytes(found, "little") for found in table.keys())[-1] == 100  # noqa: SIM118
    assert table.quota is not None
    a = table.quota.number_of(b"a")
    n_own = table.quota.used_bytes(a) // PAGE_BYTES
    assert 1 <= n_own <= 6 and table.evictions == 6 - n_own
    table.touch([key(5)], tenant=b"b")
    assert table.quota.used_bytes(a) == (n_own - 1) * PAGE_BYTES
    assert table.contains(key(5)) and put(6, b"a")
    assert table.contains(key(5))


def test_a_request_for_an_evicted_block_is_counted_with_the_time_since_its_eviction() -> None:
    table = DiskTable(n_slabs=1, slab_bytes=4 * PAGE_BYTES)
    for number in range(3):
        slot = table.allocate(PAGE_BYTES, generation=0)
        assert slot is not None
        table.publish(key(number), slot, PAGE_BYTES, number + 1, bytes(16))
        table.touch([key(number)], now_ms=1000.0 * number)
    assert table.evictions == 1 and not table.contains(key(0))
    table.touch([key(0)], now_ms=7000.0)
    assert table.policy is not None
    assert table.policy.rewanted == (1, 6000.0) or table.policy.rewanted == (1, 5000.0)

"""Limits beside the order of eviction: writes to disk by budget and reuse, tenants by their share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.dram.slots import Block, Slot, SlotTable
from services.kvstore.policy.admission import BURST_DAYS, DAY_MS, DiskAdmission, WriteBudget
from services.kvstore.policy.quota import NO_TENANT, TenantQuota
from tests.support.examples import examples

PER_DAY = 4000.0


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 300), st.floats(0, DAY_MS / 50)), max_size=300))
def test_never_more_is_written_than_the_budget_has(offers: list[tuple[float, int, float]]) -> None:
    admission, now_ms, written = DiskAdmission(WriteBudget(PER_DAY, now_ms=0.0)), 0.0, 0
    for reuse, n_bytes, pause_ms in offers:
        now_ms += pause_ms
        written += n_bytes * admission.admits(reuse, n_bytes, now_ms=now_ms)
        assert written <= PER_DAY * (BURST_DAYS + now_ms / DAY_MS) + 1e-6


def test_a_budget_fills_with_time_up_to_its_burst() -> None:
    budget = WriteBudget(PER_DAY, now_ms=0.0)
    budget.spend(600)
    assert [budget.fill(now_ms=now_ms) for now_ms in (0.0, DAY_MS / 40, 0.0)] == [0.4, 0.5, 0.5]
    assert budget.has(500) and not budget.has(501)
    assert budget.fill(now_ms=DAY_MS) == 1.0
    WriteBudget(0.5, now_ms=0.0)
    with pytest.raises(ValueError, match="more than 0"):
        WriteBudget(0.0, now_ms=0.0)


@pytest.mark.parametrize(
    ("spent", "reuse", "is_written"),
    [
        (200, 0.05, True),
        (500, 0.05, True),
        (610, 0.15, False),  # of ten blocks, the best eight
        (610, 0.2, True),
        (910, 0.75, False),
        (910, 0.8, True),
    ],
)
def test_the_emptier_the_budget_the_smaller_the_part_that_is_written(
    spent: int, reuse: float, is_written: bool
) -> None:
    admission = DiskAdmission(WriteBudget(PER_DAY, now_ms=0.0))
    assert admission.limited and not DiskAdmission(None).limited
    for number in range(1, 10):
        assert admission.admits(number / 10, 0, now_ms=0.0)
    admission.forced(spent)
    assert admission.admits(reuse, 1, now_ms=0.0) == is_written


def test_when_writes_are_scarce_the_blocks_most_likely_wanted_again_are_written() -> None:
    rng = random.Random(1)
    admission = DiskAdmission(WriteBudget(PER_DAY, now_ms=0.0))
    written: list[float] = []
    offered = [rng.random() for _ in range(4000)]
    for number, reuse in enumerate(offered):  # ten times what may be written
        if admission.admits(reuse, 10, now_ms=number * DAY_MS / 4000):
            written.append(reuse)
    assert 400 <= len(written) <= 520
    assert sum(written[110:]) / len(written[110:]) > 0.8  # after the first burst
    assert admission.refused_blocks == len(offered) - len(written)


def test_without_a_budget_everything_is_written_and_a_forced_write_is_paid_for() -> None:
    assert all(DiskAdmission(None).admits(0.0, 1 << 40, now_ms=0.0) for _ in range(10))
    admission = DiskAdmission(WriteBudget(PER_DAY, now_ms=0.0))
    admission.forced(int(PER_DAY * 2))
    assert not admission.admits(1.0, 1, now_ms=DAY_MS)
    assert admission.admits(1.0, 1, now_ms=3 * DAY_MS)


def test_a_tenant_makes_room_among_its_blocks_where_they_suffice() -> None:
    quota, evicted = TenantQuota[bytes](100, (NO_TENANT,)), list[int]()

    def evict_one() -> bool:
        if quota.used_bytes(b"a"):
            quota.add(b"a", -20)
            evicted.append(20)
        return bool(evicted)

    quota.add(b"a", 60)
    quota.add(NO_TENANT, 1000)
    assert (quota.used_bytes(b"a"), quota.used_bytes(b"b"), quota.used_bytes(NO_TENANT)) == (60, 0, 0)
    assert quota.has_room(b"a", 40) and not quota.has_room(b"a", 41) and quota.has_room(NO_TENANT, 1000)
    assert quota.make_room(NO_TENANT, 1000, evict_one) and not quota.make_room(b"a", 101, evict_one)
    assert not evicted
    assert quota.make_room(b"a", 61, evict_one) and len(evicted) == 2
    assert quota.make_room(b"a", 100, evict_one) and len(evicted) == 3 and not quota._used_bytes
    quota.add(b"b", 100)
    assert quota.make_room(b"b", 1, lambda: False) is False


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 1 << 20), share=st.floats(0.1, 0.9))
def test_no_tenant_has_more_than_its_share_and_shared_blocks_count_for_no_tenant(
    seed: int, share: float
) -> None:
    rng = random.Random(seed)
    table: SlotTable[None] = SlotTable(n_slabs=2, slab_bytes=12 * PAGE_BYTES, tenant_share=share)
    assert table.quota is not None
    limit, tenants = int(24 * PAGE_BYTES * share), [NO_TENANT, b"a", b"b"]
    taken: list[tuple[int, Slot]] = []
    held: list[Block[None]] = []
    for _ in range(200):
        tenant, number = rng.choice(tenants), rng.randrange(60)
        key = number.to_bytes(16)
        table.touch([key], tenant=tenant)
        action = rng.random()
        block = table.get(key)
        if block is None and action < 0.7 and number not in [other for other, _ in taken]:
            slot = table.allocate(PAGE_BYTES, tenant=tenant)
            if slot is not None:
                taken.append((number, slot))
        elif block is not None and action < 0.3:
            table.hold(block)
            held.append(block)
        elif block is not None and action < 0.5:
            table.drop(block)
        if taken and rng.random() < 0.7:
            number, slot = taken.pop(rng.randrange(len(taken)))
            if rng.random() < 0.9:
                table.publish(number.to_bytes(16), slot, PAGE_BYTES, None)
            else:
                table.free(slot)
        if held and rng.random() < 0.5:
            table.unhold(held.pop())
        assert all(table.quota.used_bytes(tenant) <= limit for tenant in tenants)
        table.check()
    for block in held:
        table.unhold(block)
    for _, slot in taken:
        table.free(slot)
    for key in table.keys():  # noqa: SIM118
        found = table.get(key)
        assert found is not None
        table.drop(found)
    assert not any(table.quota.used_bytes(tenant) for tenant in tenants)


def test_a_tenant_at_its_limit_makes_room_among_its_own_blocks() -> None:
    table: SlotTable[None] = SlotTable(n_slabs=1, slab_bytes=10 * PAGE_BYTES, tenant_share=0.3)

    def put(number: int, tenant: bytes) -> bool:
        slot = table.allocate(PAGE_BYTES, tenant=tenant)
        if slot is not None:
            table.publish(number.to_bytes(16), slot, PAGE_BYTES, None)
        return slot is not None

    assert all(put(number, b"b") for number in range(100, 102))
    assert all(put(number, b"a") for number in range(3))
    table.touch([number.to_bytes(16) for number in (0, 1)], tenant=b"a")
    assert put(3, b"a")
    assert sorted(int.from_bytes(key) for key in table.keys()) == [0, 1, 3, 100, 101]  # noqa: SIM118
    table.touch([(0).to_bytes(16)], tenant=b"b")  # it is public now
    assert put(4, b"a")
    assert sorted(int.from_bytes(key) for key in table.keys()) == [0, 1, 3, 4, 100, 101]  # noqa: SIM118
    assert table.allocate(4 * PAGE_BYTES, tenant=b"a") is None  # above its limit: nothing goes for it
    assert table.quota is not None and table.quota.used_bytes(b"a") == 3 * PAGE_BYTES


def test_blocks_that_are_wanted_after_they_were_evicted_are_counted_with_the_time_between() -> None:
    table: SlotTable[None] = SlotTable(n_slabs=1, slab_bytes=2 * PAGE_BYTES)
    for number in range(3):
        table.touch([number.to_bytes(16)], now_ms=1000.0 * number)
        slot = table.allocate(PAGE_BYTES)
        assert slot is not None
        table.publish(number.to_bytes(16), slot, PAGE_BYTES, None)
    for now_ms in (7000.0, 8000.0):
        table.touch([(0).to_bytes(16)], now_ms=now_ms)
    assert table.rewanted == (1, 5000.0)

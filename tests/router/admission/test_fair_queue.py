"""The fair queue: tenants share by tokens within a bound, in order per tenant, without losses."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.fair_queue import FairQueue

_COSTS = st.integers(1, 1000)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(_COSTS, min_size=60, max_size=60), min_size=2),
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([1.0, 2.0, 4.0])),
)
def test_backlogged_tenants_differ_by_one_largest_item_of_each(
    costs: dict[str, list[int]], weights: dict[str, float]
) -> None:
    queue = FairQueue(weights)
    for tenant, items in costs.items():
        for index, cost in enumerate(items):
            queue.push(tenant, f"{tenant}{index}", cost)
    served = dict.fromkeys(costs, 0.0)
    taken = dict.fromkeys(costs, 0)
    while all(taken[tenant] < 60 for tenant in costs):
        item = queue.pop()
        assert item is not None
        tenant = item[0]
        assert item == f"{tenant}{taken[tenant]}"  # first in, first out
        served[tenant] += costs[tenant][taken[tenant]] / weights.get(tenant, 1.0)
        taken[tenant] += 1
        for one in costs:
            for other in costs:
                largest = max(costs[one]) / weights.get(one, 1.0) + max(costs[other]) / weights.get(
                    other, 1.0
                )
                assert abs(served[one] - served[other]) <= largest + 1e-6


@given(st.integers(0, 2**32), st.integers(1, 200))
def test_any_order_of_calls_loses_and_repeats_no_item(seed: int, steps: int) -> None:
    rng, queue = random.Random(seed), FairQueue()
    waiting: list[str] = []
    tenant_of: dict[str, str] = {}
    for step in range(steps):
        act = rng.random()
        if act < 0.5:
            tenant_of[f"i{step}"] = rng.choice("abc")
            queue.push(tenant_of[f"i{step}"], f"i{step}", rng.randint(1, 50))
            waiting.append(f"i{step}")
        elif act < 0.7 and waiting:
            gone = waiting.pop(rng.randrange(len(waiting)))
            assert queue.remove(gone)
            assert not queue.remove(gone)
        elif act < 0.8:
            queue.charge(rng.choice("abcd"), rng.randint(-50, 50))
        else:
            head = queue.peek()
            assert queue.pop() == head
            assert (head is None) == (not waiting)
            if head is not None:
                waiting.remove(head)
        assert len(queue) == len(waiting)
        assert sorted(queue) == sorted(waiting)
        counts = {tenant: sum(tenant_of[item] == tenant for item in waiting) for tenant in "abcd"}
        assert {tenant: queue.waiting_of(tenant) for tenant in "abcd"} == counts
        longest = queue.longest()
        assert (longest[2] if longest else 0) == max(counts.values())
        if act < 0.5:
            continue
        # What is kept of idle tenants is their debt, and an empty queue forgets that, too.
        idle = [each for each in queue._tenants.values() if not each.costs]
        assert waiting or not queue._tenants
        assert all(each.start_tag > queue._virtual for each in idle) or 0.7 <= act < 0.8


def test_an_idle_tenant_accumulates_no_credit() -> None:
    queue = FairQueue()
    for index in range(100):
        queue.push("busy", f"b{index}", 10)
    for _ in range(50):
        queue.pop()
    for index in range(50):
        queue.push("new", f"n{index}", 10)
    first = [queue.pop() for _ in range(20)]
    assert 9 <= sum(item is not None and item[0] == "n" for item in first) <= 11


def test_of_tenants_served_as_much_the_one_that_waits_longer_is_next() -> None:
    queue = FairQueue()
    queue.push("returns", "r0", 10)
    queue.push("stays", "s0", 10)
    queue.push("stays", "s1", 10)
    assert [queue.pop(), queue.pop()] == ["r0", "s0"]
    queue.push("returns", "r1", 10)
    assert [queue.pop(), queue.pop()] == ["s1", "r1"]


def test_a_tenant_that_used_more_than_announced_waits_longer() -> None:
    queue = FairQueue()
    for index in range(20):
        queue.push("a", f"a{index}", 10)
        queue.push("b", f"b{index}", 10)
    queue.charge("a", 50)
    first = [queue.pop() for _ in range(6)]
    assert sum(item is not None and item[0] == "b" for item in first) >= 5


def test_an_item_is_queued_only_once() -> None:
    queue = FairQueue()
    queue.push("a", "x", 1)
    with pytest.raises(ValueError, match="waits already"):
        queue.push("b", "x", 1)

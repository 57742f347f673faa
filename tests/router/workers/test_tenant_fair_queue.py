"""Turns by time: no tenant waits for long, one alone waits for nothing, and no item is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.workers.delivery import token_batcher
from services.router.workers.delivery.tenant_fair_queue import TenantFairQueue
from services.router.workers.delivery.token_batcher import MAX_PAUSE_S, SLICE_S, TokenBatcher

_COSTS = st.lists(st.integers(1, 100), min_size=30, max_size=30)


@given(st.dictionaries(st.sampled_from("abcd"), _COSTS, min_size=2))
def test_tenants_with_items_differ_by_one_largest_item_of_each(costs: dict[str, list[int]]) -> None:
    queue: TenantFairQueue[int] = TenantFairQueue()
    for tenant, items in costs.items():
        for index in range(len(items)):
            queue.push(tenant, index)
    took, taken = dict.fromkeys(costs, 0), dict.fromkeys(costs, 0)
    while all(taken[tenant] < 30 for tenant in costs):
        owner, index = queue.pop()
        tenant = str(owner)
        assert index == taken[tenant]  # first in, first out
        queue.charge(tenant, costs[tenant][index])
        took[tenant] += costs[tenant][index]
        taken[tenant] += 1
        for one in costs:
            for other in costs:
                assert abs(took[one] - took[other]) <= max(costs[one]) + max(costs[other])


@given(st.integers(0, 2**32), st.integers(1, 400))
def test_any_order_of_calls_loses_no_item_and_keeps_few_tags(seed: int, steps: int) -> None:
    rng, queue = random.Random(seed), TenantFairQueue[int]()
    waiting: dict[str, list[int]] = {}
    for step in range(steps):
        if rng.random() < 0.5:
            tenant = str(rng.randrange(1000))
            queue.push(tenant, step)
            waiting.setdefault(tenant, []).append(step)
        elif len(queue):
            owner, item = queue.pop()
            assert isinstance(owner, str)
            assert waiting[owner].pop(0) == item
            queue.charge(owner, rng.random())
        assert len(queue) == sum(map(len, waiting.values()))
    assert len(queue._tags) <= 2 * len(queue) + 200


def test_a_tenant_that_returns_has_no_credit() -> None:
    queue: TenantFairQueue[str] = TenantFairQueue()
    for index in range(10):
        queue.push("busy", f"b{index}")
    for _ in range(5):
        queue.charge(queue.pop()[0], 1.0)
    for index in range(3):
        queue.push("idle", f"i{index}")
    order = []
    for _ in range(6):
        tenant, _item = queue.pop()
        queue.charge(tenant, 1.0)
        order.append(tenant)
    assert order.count("idle") == 3 and order[:2] != ["idle", "idle"]


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Delivery:
    """Takes some milliseconds of the test's clock."""

    def __init__(self, clock: _Clock, tenant: str, took_s: float, log: Callable[[str], None]) -> None:
        self.tenant, self._clock, self._took_s, self._log = tenant, clock, took_s, log

    def deliver(self) -> None:
        self._clock.now_s += self._took_s
        self._log(self.tenant)


async def test_streams_of_one_tenant_delay_each_step_of_another_one_by_a_slice() -> None:
    """A request begins in several iterations of the event loop: each costs one slice, not a whole round."""
    clock, seen = _Clock(), list[str]()
    batcher = TokenBatcher(clock=clock)
    for _ in range(120):
        batcher.mark(_Delivery(clock, "heavy", 1e-3, seen.append))
    gaps_s: list[float] = []
    while len(seen) < 120:
        before_s = clock.now_s
        await asyncio.sleep(0)
        gaps_s.append(clock.now_s - before_s)
    assert max(gaps_s) <= 4e-3
    assert len(gaps_s) >= 40


async def test_tokens_of_a_light_tenant_overtake_the_round_of_a_heavy_one() -> None:
    clock, seen = _Clock(), list[str]()
    batcher = TokenBatcher(clock=clock)
    for _ in range(200):
        batcher.mark(_Delivery(clock, "heavy", 2e-3, seen.append))
    while len(seen) < 5:
        await asyncio.sleep(0)
    batcher.mark(_Delivery(clock, "light", 1e-3, seen.append))
    while len(seen) < 201:
        await asyncio.sleep(0)
    # The next round joins one that has taken 50 ms.
    assert seen.index("light") <= 5 + 50 // 2


async def test_work_that_tasks_wait_for_takes_turns_and_passes_errors_on() -> None:
    clock, order = _Clock(), list[str]()
    batcher = TokenBatcher(clock=clock)

    def work(tenant: str) -> str:
        clock.now_s += SLICE_S
        order.append(tenant)
        return tenant

    async def run(tenant: str) -> Any:
        return await batcher.run(tenant, lambda: work(tenant))

    tasks = [asyncio.create_task(run("heavy")) for _ in range(20)]
    await asyncio.sleep(0)
    assert order == ["heavy"]  # one at once, the others in turns
    tasks.append(asyncio.create_task(run("light")))
    cancelled = asyncio.create_task(run("gone"))
    await asyncio.sleep(0)
    cancelled.cancel()
    results = await asyncio.gather(*tasks)
    assert results == ["heavy"] * 20 + ["light"]
    assert order.index("light") <= 4
    assert "gone" not in order

    def fail() -> None:
        raise ValueError("no")

    outcome = await asyncio.gather(*[batcher.run("a", fail) for _ in range(2)], return_exceptions=True)
    assert [type(error) for error in outcome] == [ValueError, ValueError]


async def test_reading_waits_for_deliveries_that_are_late() -> None:
    clock, seen = _Clock(), list[str]()
    batcher = TokenBatcher(clock=clock)
    await batcher.caught_up()
    for _ in range(10):
        batcher.mark(_Delivery(clock, "heavy", 0.5, seen.append))
    while len(seen) < 4:
        await asyncio.sleep(0)
    await batcher.caught_up()
    assert len(seen) == 10


async def test_reading_goes_on_beside_deliveries_that_stay_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames that wait are of other tenants, too."""
    monkeypatch.setattr(token_batcher, "MAX_STOP_S", 0.0)
    clock, seen = _Clock(), list[str]()
    batcher = TokenBatcher(clock=clock)
    for _ in range(1000):
        batcher.mark(_Delivery(clock, "heavy", 0.5, seen.append))
    while len(seen) < 4:
        await asyncio.sleep(0)
    await batcher.caught_up()
    assert len(seen) < 100


async def test_tenants_share_deliveries_by_time() -> None:
    clock, seen = _Clock(), list[str]()
    clock.now_s = 500.0
    batcher = TokenBatcher(clock=clock)
    for tenant, took_s, n_items in (("slow", 1e-3, 20), ("quick", 1e-4, 200)):
        for _ in range(n_items):
            batcher.mark(_Delivery(clock, tenant, took_s, seen.append))
    while len(seen) < 220:
        await asyncio.sleep(0)
    half = seen[: seen.index("slow") + 110]
    assert 8 <= half.count("slow") <= 12


async def test_the_next_iteration_has_a_slice_of_its_own_but_no_work_overtakes_what_waits() -> None:
    clock, order = _Clock(), list[str]()
    batcher = TokenBatcher(clock=clock)

    def work(name: str) -> None:
        clock.now_s += SLICE_S
        order.append(name)

    await batcher.run("a", lambda: work("first"))
    await asyncio.sleep(0)
    at_once = asyncio.create_task(batcher.run("a", lambda: work("second")))
    waiting = [asyncio.create_task(batcher.run("a", lambda name=name: work(name))) for name in "xyz"]  # type: ignore[misc]
    await asyncio.sleep(0)
    assert at_once.done() and order == ["first", "second"]
    while len(order) < 4:
        await asyncio.sleep(0)
    await asyncio.gather(batcher.run("a", lambda: work("last")), *waiting)
    assert order == ["first", "second", "x", "y", "z", "last"]


async def test_only_rounds_that_stay_long_make_a_pause() -> None:
    clock, seen = _Clock(), list[str]()
    batcher = TokenBatcher(clock=clock)

    async def round_of(took_s: float) -> float:
        clock.now_s += 1.0  # beyond every pause
        n_seen = len(seen)
        batcher.mark(_Delivery(clock, "a", took_s, seen.append))
        while len(seen) == n_seen or batcher._running:
            await asyncio.sleep(0)
        return batcher.pause_s

    pauses_s = [await round_of(took_s) for took_s in (0.01, 0.005, 0.01, 1.0, 1.0, 0.0, 0.01)]
    assert pauses_s == pytest.approx([0.0, 0.02, 0.02, 0.04, MAX_PAUSE_S, 0.0, 0.0])


async def test_work_of_a_task_that_a_slice_woke_waits_for_what_came_before_it() -> None:
    clock, order, woken = _Clock(), list[str](), asyncio.Event()
    batcher = TokenBatcher(clock=clock)

    def note(tenant: str) -> None:
        order.append(tenant)
        if len(order) == 2:
            woken.set()

    for took_s in (SLICE_S / 4, SLICE_S, SLICE_S, SLICE_S):
        batcher.mark(_Delivery(clock, "a", took_s, note))
    await woken.wait()
    assert order == ["a", "a"]
    await batcher.run("a", lambda: order.append("work"))
    assert order == ["a"] * 4 + ["work"]

"""Hedging sends a slow prefill to a second worker: rarely, and only where that helps."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from services.router.execution.policies.hedge_policy import MIN_SAMPLES, SAMPLES, HedgeLimits, HedgePolicy
from services.router.request.model_card import ModelCard
from slipstream.async_client import AsyncClient
from tests.router.conftest import eventually, open_router
from tests.router.support.fake_cluster import FakeCluster


def policy_with_long_tail(limits: HedgeLimits | None = None) -> HedgePolicy:
    policy = HedgePolicy(limits)
    for number in range(100):
        policy.observe(500.0 if number % 20 == 0 else 10.0, uncached_tokens=100)
    return policy


def test_with_a_long_tail_a_hedge_starts_after_most_prefills_have_answered() -> None:
    wait_ms = policy_with_long_tail().wait_ms(uncached_tokens=100, cached_tokens=0, other_workers=1)
    assert wait_ms is not None and 10.0 <= wait_ms <= 500.0


def test_without_a_long_tail_no_hedge_starts() -> None:
    policy = HedgePolicy()
    for number in range(100):
        policy.observe(10.0 + number % 7, uncached_tokens=100)
    assert policy.wait_ms(uncached_tokens=100, cached_tokens=0, other_workers=3) is None


@given(
    st.lists(st.floats(0, 1e5), max_size=300),
    st.integers(0, 10_000),
    st.integers(0, 10_000),
    st.integers(0, 3),
)
def test_long_and_cached_prompts_and_lone_workers_are_not_hedged(
    samples: list[float], uncached: int, cached: int, others: int
) -> None:
    limits = HedgeLimits()
    policy = HedgePolicy(limits)
    for sample in samples:
        policy.observe(sample, uncached_tokens=1)
    wait_ms = policy.wait_ms(uncached_tokens=uncached, cached_tokens=cached, other_workers=others)
    if wait_ms is not None:
        assert others >= 1 and uncached <= limits.max_uncached_tokens and cached <= uncached
        assert len(samples) >= MIN_SAMPLES
        assert wait_ms >= limits.min_wait_ms


@given(st.lists(st.sampled_from([0.0, 1.0, 5.0, 30.0, 400.0]), min_size=MIN_SAMPLES, max_size=600))
def test_only_the_latest_samples_count(samples: list[float]) -> None:
    limits = HedgeLimits()
    policy, latest = HedgePolicy(limits), HedgePolicy(limits)
    for sample in samples:
        policy.observe(sample, uncached_tokens=1)
    for sample in samples[-SAMPLES:]:
        latest.observe(sample, uncached_tokens=1)
    asked = {"uncached_tokens": 1, "cached_tokens": 0, "other_workers": 1}
    assert policy.wait_ms(**asked) == latest.wait_ms(**asked)


def wait_ms_after(
    samples_ms: list[float], *, uncached_tokens: int = 100, cached_tokens: int = 0, other_workers: int = 1
) -> float | None:
    policy = HedgePolicy()
    for sample_ms in samples_ms:
        policy.observe(sample_ms, uncached_tokens=HedgeLimits().max_uncached_tokens)
        policy.observe(1e6, uncached_tokens=HedgeLimits().max_uncached_tokens + 1)  # counts for nothing
    return policy.wait_ms(
        uncached_tokens=uncached_tokens, cached_tokens=cached_tokens, other_workers=other_workers
    )


def test_a_hedge_waits_for_the_95th_percentile_where_the_99th_is_three_medians() -> None:
    most = [5.0] * 60 + [10.0] * 130 + [25.0] * 8
    assert wait_ms_after([*most, 30.0, 1000.0]) == 25.0
    assert wait_ms_after([*most, 29.0, 1000.0]) is None
    assert wait_ms_after([sample_ms / 2 for sample_ms in [*most, 30.0, 30.0]]) == HedgeLimits().min_wait_ms


def test_where_hedges_begin_to_be_refused() -> None:
    bad = [10.0] * (MIN_SAMPLES - 2) + [100.0] * 2
    most = HedgeLimits().max_uncached_tokens
    assert wait_ms_after(bad, uncached_tokens=most, cached_tokens=most) == 100.0
    assert wait_ms_after(bad, uncached_tokens=most + 1) is None
    assert wait_ms_after(bad, cached_tokens=101) is None
    assert wait_ms_after(bad, other_workers=0) is None
    assert wait_ms_after(bad[1:]) is None


def test_prefills_add_to_the_budget_up_to_its_bound() -> None:
    policy = HedgePolicy(HedgeLimits(budget_share=0.5, max_saved_hedges=2.0))
    assert [policy.spend(), policy.spend()] == [True, False]
    for n_prefills, hedges in (
        (1, [False]),
        (1, [True, False]),
        (3, [True, False]),
        (9, [True, True, False]),
    ):
        for _ in range(n_prefills):
            policy.observe(1.0, uncached_tokens=1)
        assert [policy.spend() for _ in hedges] == hedges


@given(st.lists(st.booleans(), max_size=400))
def test_the_budget_bounds_the_number_of_hedges(actions: list[bool]) -> None:
    limits = HedgeLimits()
    policy, prefills, hedges = HedgePolicy(limits), 0, 0
    for hedged in actions:
        if hedged:
            hedges += policy.spend()
        else:
            policy.observe(1.0, uncached_tokens=1)
            prefills += 1
    assert hedges <= 1 + prefills * limits.budget_share + 1e-6


async def test_a_hedge_overtakes_a_slow_prefill_worker(cluster: FakeCluster, card: ModelCard) -> None:
    async with open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        # On a slow machine the other worker's prompts are hedged too, from the same budget.
        router.manager.context.failover.hedge_policy = policy_with_long_tail(
            HedgeLimits(budget_share=8.0, max_saved_hedges=100.0)
        )
        slow = cluster.prefills[0]
        for number in range(40):  # until a prompt starts there
            question = [{"role": "user", "content": f"Where is order {number}?"}]
            slow.gate.clear()
            seen = len(slow.requests)
            async with asyncio.timeout(60):
                reply = await client.chat(question, seed=1)
            began_there = any(r.attempt.attempt == 1 for r in slow.requests[seen:])
            slow.gate.set()
            assert reply.text == (await client.chat(question, seed=1)).text
            stats = reply.stats
            assert stats is not None
            assert stats.prefill_worker != slow.instance
            if began_there:
                assert stats.attempts == 2
                break
        else:
            raise AssertionError("no prompt started on the slow worker")
        assert router.counters.snapshot()["slipstream_hedges_total"] >= 1
        await eventually(lambda: not cluster.held and not router.manager.held)
        assert not router.fleet.tokens_in_flight


async def test_a_losing_hedge_is_released_and_the_statistics_name_the_winner(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        router.manager.context.failover.hedge_policy = policy_with_long_tail()
        for prefill in cluster.prefills:
            prefill.gate.clear()
        asked = asyncio.create_task(client.chat([{"role": "user", "content": "Where is it?"}], seed=1))
        await eventually(lambda: all(prefill.requests for prefill in cluster.prefills))
        first = next(p for p in cluster.prefills if p.requests[-1].attempt.attempt == 1)
        first.gate.set()
        async with asyncio.timeout(60):
            reply = await asked
        assert reply.stats is not None
        assert (reply.stats.prefill_worker, reply.stats.attempts) == (first.instance, 2)
        for prefill in cluster.prefills:
            prefill.gate.set()
        await eventually(lambda: not cluster.held and not router.manager.held)


async def test_a_requested_prefill_is_not_hedged(cluster: FakeCluster, card: ModelCard) -> None:
    """A requested prefill has no second worker, so it does not use the hedge budget."""
    async with (
        open_router(cluster, card, allow_requested_prefill=True) as router,
        AsyncClient(router.host.endpoint) as client,
    ):
        hedges = router.manager.context.failover.hedge_policy = policy_with_long_tail()
        asked: list[int] = []
        wait_ms = hedges.wait_ms

        def recorded(**case: int) -> float | None:
            asked.append(case["other_workers"])
            return wait_ms(**case)

        hedges.wait_ms = recorded  # type: ignore[method-assign]
        question = [{"role": "user", "content": "Where is it?"}]
        worker = cluster.prefills[0].instance
        reply = await client.chat(question, seed=1, headers={"x-slipstream-prefill": worker})
        assert reply.stats is not None
        assert (reply.stats.prefill_worker, asked) == (worker, [])
        await client.chat(question, seed=1)
        assert asked == [len(cluster.prefills) - 1]
        await eventually(lambda: not cluster.held and not router.manager.held)

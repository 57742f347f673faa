"""The worker that a scale-down drains."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster.worker_record import Role
from services.router.autoscale.removal import WorkerHoldings, deletion_cost, removal_order

counts = st.integers(0, 1000)
holdings = st.builds(
    WorkerHoldings,
    role=st.sampled_from([Role.PREFILL, Role.DECODE]),
    instance=st.from_regex(r"[a-z]{1,6}", fullmatch=True),
    requests=counts,
    tokens_in_flight=counts,
    unique_blocks=counts,
    sessions=counts,
    session_blocks=counts,
)


@given(st.lists(holdings, max_size=8))
def test_the_order_puts_the_least_loss_of_each_tier_first(workers: list[WorkerHoldings]) -> None:
    order = removal_order(reversed(workers))
    assert sorted(map(id, order)) == sorted(map(id, workers))
    for before, after in itertools.pairwise(order):
        assert before.role <= after.role
        assert before.role != after.role or before.lost_tokens <= after.lost_tokens


def one(instance: str, **fields: Any) -> WorkerHoldings:
    return WorkerHoldings(Role.PREFILL, instance, **fields)


def first(*workers: WorkerHoldings) -> str:
    return removal_order(workers)[0].instance


def test_kv_that_exists_nowhere_else_weighs_more_than_what_can_be_read() -> None:
    assert first(one("unique", unique_blocks=100), one("copied", session_blocks=1000)) == "copied"
    assert first(one("few", unique_blocks=1), one("sessions", session_blocks=100)) == "few"


def test_running_prompts_count_by_their_tokens() -> None:
    assert first(one("long", tokens_in_flight=50_000), one("cached", unique_blocks=100)) == "cached"


def test_equal_losses_go_by_sessions_then_requests_then_name() -> None:
    assert first(one("b", sessions=1), one("a", sessions=2)) == "b"
    assert first(one("b", requests=1), one("a", requests=2)) == "b"
    assert first(one("b"), one("a")) == "a"


@given(holdings, holdings)
def test_a_larger_loss_has_no_smaller_cost(one: WorkerHoldings, other: WorkerHoldings) -> None:
    losses = [each.lost_tokens + each.sessions + each.requests for each in (one, other)]
    costs = [deletion_cost(each) for each in (one, other)]
    assert (losses[0] - losses[1]) * (costs[0] - costs[1]) >= 0
    assert all(0 <= cost < 1 << 31 for cost in costs)


@given(st.integers(0, 1 << 50))
def test_a_cost_grows_by_eight_for_twice_a_large_loss_and_little_for_a_fifth(tokens: int) -> None:
    cost, fifth_more, twice = (
        deletion_cost(one("a", tokens_in_flight=count)) for count in (tokens, tokens * 6 // 5, tokens * 2)
    )
    assert fifth_more - cost <= 3
    assert twice - cost <= 9
    if tokens > 1024:  # more than twice the dead band of slipstream/pod_costs/decision.py
        assert twice - cost >= 5


def test_nothing_lost_costs_nothing_and_a_busy_router_costs_more_than_an_idle_one() -> None:
    idle, busy = (WorkerHoldings(Role.ROUTER, name, requests=count) for name, count in (("a", 0), ("b", 90)))
    assert deletion_cost(idle) == 0 < deletion_cost(busy)

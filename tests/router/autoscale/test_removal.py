"""The worker that a scale-down drains."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster.worker_record import Role
from services.router.autoscale.removal import WorkerHoldings, removal_order

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

"""The day of traffic and the rules on it, in small."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.autoscale.__main__ import compare
from bench.autoscale.day import BURST_FROM_MS, BURST_UNTIL_MS, DAY_MS, day_of, rate_at
from bench.autoscale.hpa import PERIOD_S, HpaController
from bench.placement.trace import AgentShape, agent_sessions

TRACE = agent_sessions(AgentShape(duration_ms=60_000.0, turns=(2, 4)), seed=1)


def test_a_day_has_the_requests_in_order_and_follows_the_hours() -> None:
    day = list(day_of(TRACE, 5000))
    assert all(before.at_ms <= after.at_ms for before, after in pairwise(day))
    assert day[0].at_ms >= 0 and day[-1].at_ms <= DAY_MS
    night = sum(request.at_ms < DAY_MS / 12 for request in day)
    noon = sum(abs(request.at_ms - DAY_MS / 2) < DAY_MS / 24 for request in day)
    assert noon > 3 * night
    burst = sum(BURST_FROM_MS <= request.at_ms < BURST_UNTIL_MS for request in day)
    before = sum(2 * BURST_FROM_MS - BURST_UNTIL_MS <= request.at_ms < BURST_FROM_MS for request in day)
    assert burst > 1.3 * before
    assert rate_at(DAY_MS / 2) == pytest.approx(1.0)


def test_repetitions_share_no_blocks() -> None:
    day = list(day_of(TRACE, 2 * len(TRACE)))
    first = {block for request in day[: len(TRACE)] for block in request.hashes}
    assert first.isdisjoint(block for request in day[len(TRACE) :] for block in request.hashes)


def test_all_rules_serve_the_whole_day() -> None:
    report = compare("small", TRACE, 300)
    assert len(report["results"]) == 5
    for row in report["results"]:
        assert row["ttft_within"] > 0.9
        assert row["worker_hours"] == {"prefill": 24.0, "decode": 24.0}, "one of each is enough"


# ---- HPA's formula


def test_hpa_tolerates_a_tenth_and_rounds_up() -> None:
    assert HpaController(1, 10).step(0.0, replicas=4, total=4.39) == 4
    assert HpaController(1, 10).step(0.0, replicas=4, total=4.5) == 5
    assert HpaController(1, 10, down_window_s=1.0).step(0.0, replicas=4, total=3.5) == 4
    assert HpaController(1, 10, down_window_s=1.0).step(0.0, replicas=4, total=2.9) == 3


def test_hpa_grows_by_four_or_to_the_double_and_within_its_bounds() -> None:
    assert HpaController(1, 100).step(0.0, replicas=1, total=50.0) == 5
    assert HpaController(1, 100).step(0.0, replicas=10, total=50.0) == 20
    assert HpaController(1, 12).step(0.0, replicas=10, total=50.0) == 12


def test_hpa_shrinks_to_the_highest_wish_of_its_window() -> None:
    hpa = HpaController(1, 10, down_window_s=60.0)
    sizes = [hpa.step(0.0, replicas=8, total=8.0)]
    for period in range(1, 6):
        sizes.append(hpa.step(period * PERIOD_S, replicas=sizes[-1], total=2.0))
    assert sizes == [8, 8, 8, 8, 2, 2]


def test_a_window_upwards_leaves_out_what_is_short() -> None:
    hpa = HpaController(1, 10, up_window_s=60.0)
    assert [hpa.step(n * PERIOD_S, replicas=2, total=2.0 if n in (0, 2) else 6.0) for n in range(4)] == [
        2
    ] * 4
    assert [hpa.step(n * PERIOD_S, replicas=2, total=6.0) for n in range(4, 8)] == [2, 2, 6, 6]

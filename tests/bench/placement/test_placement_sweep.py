"""The sweep over loads: what a load is, where a limit is passed, and that every rule is asked the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.placement.compare import simulate
from bench.placement.model import Hardware
from bench.placement.policies import LeastLoad, LendingRule, PrefixAware, RoundRobin, Slipstream
from bench.placement.sweep import at_load, crossing, how_known, offered, sweep, value_at
from bench.placement.trace import BLOCK_TOKENS, AgentShape, TraceRequest, agent_sessions
from services.router.placement.cost_model import PrefillModel

SMALL = replace(Hardware(), n_prefill=2, n_decode=2, cache_blocks=200)
SHAPE = AgentShape(sessions_per_s=0.1, duration_ms=60_000.0, tools_blocks=(4, 6), turns=(2, 4))


def request(number: int, at_ms: float, blocks: list[int]) -> TraceRequest:
    hashes = tuple(b.to_bytes(16, "little") for b in blocks)
    return TraceRequest(number, at_ms, len(blocks) * BLOCK_TOKENS + 10, 1, hashes, "")


def test_load_is_what_has_to_be_computed_of_what_can_be() -> None:
    hardware = replace(SMALL, prefill=PrefillModel(1e-9, 1.0, 1e-12, 1, 1, 1))  # a token is a millisecond
    requests = [request(0, 0.0, [1, 2]), request(1, 1_000.0, [1, 2])]
    load = offered(requests, hardware)
    assert load.uncached == pytest.approx(2 * 1034 / 2_000)
    assert load.least == pytest.approx((1034 + 10) / 2_000)
    assert offered(at_load(requests, 0.25, hardware), hardware).least == pytest.approx(0.25)


values = st.lists(st.floats(1, 1e6), min_size=2, max_size=8)


@given(values, st.floats(1, 1e6))
def test_a_capacity_is_where_the_limit_is_passed_first(latencies: list[float], limit: float) -> None:
    loads = [0.1 * (i + 1) for i in range(len(latencies))]
    load = crossing(loads, latencies, limit)
    assert loads[0] <= load <= loads[-1]
    assert all(value <= limit for at, value in zip(loads, latencies, strict=True) if at < load - 1e-9)
    if loads[0] < load < loads[-1] - 1e-9:
        assert value_at(loads, latencies, load) == pytest.approx(limit, rel=1e-6)
    known = how_known(latencies, limit)
    assert known in ("at", "at most", "at least")
    assert (known == "at most") == (latencies[0] > limit)
    assert (known == "at least") == (max(latencies) <= limit)


def test_all_rules_are_swept_over_the_same_loads() -> None:
    report = sweep("agents", agent_sessions(SHAPE), SMALL, loads=(0.2, 0.8), rules=(PrefixAware, Slipstream))
    rows = report["loads"]
    assert isinstance(rows, list)
    assert [[r["rule"] for r in row["results"]] for row in rows] == [["prefix-aware", "slipstream"]] * 2
    ours, best = rows[0]["results"][1]["ttft_p90_ms"], rows[0]["results"][0]["ttft_p90_ms"]
    assert rows[0]["ttft_p90_below_best_other"] == pytest.approx(1 - ours / best)
    assert report["ttft_limit_ms"] == pytest.approx(2 * best)
    assert set(report["capacity_is"]) == {"prefix-aware", "slipstream"}  # type: ignore[call-overload]


def test_a_rule_may_be_given_lenders_and_ours_may_be_denied_them() -> None:
    requests = agent_sessions(SHAPE)
    plain, lent = (
        simulate(requests, SMALL, RoundRobin()),
        simulate(requests, SMALL, LendingRule(RoundRobin())),
    )
    assert lent.cached_share > plain.cached_share
    assert LendingRule(LeastLoad()).name == "least load, caches lent"
    denied = Slipstream(lends=False)
    assert simulate(requests, SMALL, denied).rule == "slipstream, nothing lent"

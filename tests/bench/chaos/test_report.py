"""How the outcomes of a chaos run are judged."""

from __future__ import annotations

from bench.chaos.leftovers import Sample, growth
from bench.chaos.outcome import HTTP, SDK, Outcome
from bench.chaos.report import judge, report

EXPECTED = ["right"]


def _outcome(api: str = SDK, *, text: str = "right", error: str = "", router: str = "") -> Outcome:
    return Outcome(api, 0, 10.0, router, 12.0, text, error, [10.5, 10.6, 11.6])


def test_a_wrong_text_and_a_failure_over_the_sdk_never_hold() -> None:
    assert judge([_outcome(), _outcome(HTTP)], EXPECTED, {}).holds
    wrong = judge([_outcome(text="wrong")], EXPECTED, {})
    assert not wrong.holds and len(wrong.wrong) == 1
    failed = judge([_outcome(error="Unavailable: gone")], EXPECTED, {"": [(0.0, 99.0)]})
    assert not failed.holds and report([], failed)["failed_sdk"] == {"Unavailable: gone": 1}


def test_a_failure_over_http_is_excused_only_while_its_router_was_down() -> None:
    failed = [_outcome(HTTP, error="cut", router="router-0")]
    assert judge(failed, EXPECTED, {"router-0": [(11.0, 20.0)]}).holds
    assert not judge(failed, EXPECTED, {"router-0": [(12.5, 20.0)], "router-1": [(0.0, 99.0)]}).holds


def test_the_report_has_the_longest_stall_of_each_answer() -> None:
    outcomes = [_outcome(), _outcome(error="cut")]
    found = report(outcomes, judge(outcomes, EXPECTED, {}))
    assert found["requests"] == {SDK: 2, HTTP: 0} and found["answered"] == 1
    assert found["stall_s"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}


def test_growth_is_a_slope_after_the_warm_part() -> None:
    samples = [{"decode-0": Sample(60.0 * n, 50_000_000 * (n > 1) + 1_000_000 * n, 20)} for n in range(20)]
    assert growth(samples) == {"decode-0": {"rss_mb_per_hour": 60.0, "descriptors_per_hour": 0.0}}
    assert growth([]) == {}

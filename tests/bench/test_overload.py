"""What the overload benchmark reads from /metrics, and what it takes for a refusal."""

from __future__ import annotations

import pytest

from bench.overload.load import check_http_refusal, refusal_quantiles
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.exposition import render_metrics


def metrics(counters: Counters) -> str:
    return render_metrics(counters)[0].decode()


def test_quantiles_are_of_what_came_between_two_readings() -> None:
    counters = Counters()
    for _ in range(100):
        counters.observe("slipstream_refusal_seconds", 0.9)
    before = metrics(counters)
    assert refusal_quantiles(before, before) == {"count": 0}
    for _ in range(98):
        counters.observe("slipstream_refusal_seconds", 0.0006)
    for _ in range(2):
        counters.observe("slipstream_refusal_seconds", 0.008)
    found = refusal_quantiles(before, metrics(counters))
    assert found["count"] == 100
    assert 0.5 < found["p50"] <= 0.7
    assert 7.0 < found["p99"] <= 10.0
    assert found["share_within_5_ms"] == 0.98
    assert refusal_quantiles("", metrics(counters))["count"] == 200


def test_only_the_right_words_are_a_refusal() -> None:
    said = {"error": {"code": "3040", "message": "busy"}}
    check_http_refusal(429, {"Retry-After": "1"}, said)
    for status, headers, body in (
        (503, {"Retry-After": "1"}, said),
        (429, {}, said),
        (429, {"Retry-After": "1"}, {"error": {"code": None}}),
    ):
        with pytest.raises(Exception, match="HTTP"):
            check_http_refusal(status, headers, body)

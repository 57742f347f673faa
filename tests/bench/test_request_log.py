"""What a load run reports, from made-up logs."""

from __future__ import annotations

import pytest

from bench.request_log import RequestLog, percentiles, summarise


def _log(sent_s: float, *arrivals: tuple[float, int]) -> RequestLog:
    return RequestLog(
        sent_s=sent_s,
        arrivals=list(arrivals),
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=arrivals[-1][1],
        decode_steps=2,
    )


def test_tokens_that_arrive_together_share_the_gap_before_them() -> None:
    log = _log(0.0, (0.1, 1), (0.4, 4), (0.8, 5))
    assert log.itl_ms() == pytest.approx([100.0] * 3 + [400.0])
    assert log.time_per_token_ms == pytest.approx(175.0)
    assert _log(0.0, (0.1, 1)).time_per_token_ms is None
    assert _log(1.0, (1.25, 1)).ttft_ms == pytest.approx(250.0)


def test_a_report_counts_failures_and_goodput() -> None:
    fast, slow = _log(0.0, (0.1, 1), (0.2, 3)), _log(0.0, (2.0, 1), (2.1, 3))
    failed = RequestLog(sent_s=0.0, error="Overloaded")
    report = summarise([fast, slow, failed], wall_s=2.0, ttft_limit_ms=1000, itl_limit_ms=60)
    assert (report["requests"], report["failed"], report["errors"]) == (3, 1, {"Overloaded": 1})
    assert report["goodput_share"] == pytest.approx(1 / 3, abs=1e-4)
    assert report["cached_share"] == 0.4
    assert report["completion_tokens_per_s"] == 3.0
    assert report["tokens_per_decode_step"] == 1.0


def test_percentiles_of_none_and_of_one() -> None:
    assert percentiles([]) == {}
    assert percentiles([5.0]) == {"p50": 5.0, "p90": 5.0, "p99": 5.0}

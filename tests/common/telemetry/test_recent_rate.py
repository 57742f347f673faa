"""Rates of running totals."""

from __future__ import annotations

import pytest

from libs.common.telemetry.recent_rate import RecentRate


def test_a_steady_rise_is_its_rate() -> None:
    rate = RecentRate(window_s=10)
    assert rate.per_s(100.0, 7.0) == 0.0
    for tick in range(1, 200):
        assert rate.per_s(100.0 + tick * 0.25, 7.0 + tick) == pytest.approx(4.0)


def test_what_ended_is_forgotten_after_two_windows() -> None:
    rate = RecentRate(window_s=10)
    rate.per_s(0.0, 0.0)
    assert rate.per_s(1.0, 50.0) == 50.0
    seen = [rate.per_s(float(second), 50.0) for second in range(2, 23)]
    assert seen == sorted(seen, reverse=True)
    assert seen[0] > 0.0
    assert seen[-1] == 0.0


def test_a_rate_spans_at_least_one_window_after_the_first() -> None:
    rate = RecentRate(window_s=10)
    for tenth in range(101):
        rate.per_s(tenth / 10, 0.0)
    assert rate.per_s(10.1, 1.0) == pytest.approx(1 / 10.1)

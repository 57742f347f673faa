"""Rates and quantiles from the counters' histograms."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libs.common.telemetry.counters import Counters
from services.router.console.rates import WINDOW_S, RateWindow, counter_state, quantile_ms

ENDS_S = (0.01, 0.1, 1.0, 10.0)


@given(
    values_s=st.lists(st.floats(0.0001, 20), min_size=1, max_size=200),
    share=st.floats(0.01, 1.0),
)
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values_s: list[float], share: float) -> None:
    counts = [0] * (len(ENDS_S) + 1)
    for value_s in values_s:
        counts[sum(value_s > end for end in ENDS_S)] += 1
    rank = max(1, -(-share * len(values_s) // 1))
    true_s = sorted(values_s)[int(rank) - 1]
    found = quantile_ms(counts, ENDS_S, share)
    assert found is not None
    bucket = sum(true_s > end for end in ENDS_S)
    begin_s = (0.0, *ENDS_S)[min(bucket, len(ENDS_S) - 1)]
    end_s = ENDS_S[min(bucket, len(ENDS_S) - 1)]
    assert begin_s * 1e3 - 0.001 <= found <= end_s * 1e3 + 0.001


def test_nothing_has_no_quantile() -> None:
    assert quantile_ms([0, 0], (1.0,), 0.5) is None
    assert quantile_ms([], (), 0.5) is None


def test_rates_count_what_came_within_the_window() -> None:
    counters, window = Counters(), RateWindow()
    counters.add("slipstream_requests_total", 1000)  # before anyone reads
    first = window.rates(counter_state(counters, at_s=0.0), time_ms=0.0)
    assert first["requests_per_s"] == 0 and first["ttft_ms_p50"] is first["cached_share"] is None
    counters.add("slipstream_requests_total", 20)
    counters.add("slipstream_prompt_tokens_total", 100)
    counters.add("slipstream_cached_tokens_total", 25)
    counters.observe("slipstream_time_to_first_token_seconds", 0.2)
    counters.observe("slipstream_inter_token_latency_seconds", 0.02, count=9)
    found = window.rates(counter_state(counters, at_s=2.0), time_ms=2e3)
    assert (found["requests_per_s"], found["tokens_per_s"], found["cached_share"]) == (10.0, 5.0, 0.25)
    assert found["ttft_ms_p50"] > found["itl_ms_p99"] > 0
    counters.add("slipstream_cached_tokens_total", 1000)  # of prompts that began before the window
    assert window.rates(counter_state(counters, at_s=2.5), time_ms=2.5e3)["cached_share"] == 1.0
    for second in range(3, 30):
        found = window.rates(counter_state(counters, at_s=float(second)), time_ms=0.0)
    assert found["requests_per_s"] == 0 and found["ttft_ms_p99"] is None
    assert len(window._states) <= WINDOW_S + 2

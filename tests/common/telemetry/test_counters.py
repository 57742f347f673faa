"""Totals that stay exact, labels that the table knows, histograms without a search per bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.telemetry.counters import Counters
from libs.common.telemetry.metric_tables.table import METRICS

FINISHED = "slipstream_requests_finished_total"
TTFT = "slipstream_time_to_first_token_seconds"


def test_a_name_outside_the_table_is_refused() -> None:
    with pytest.raises(KeyError, match="slipstream_made_up"):
        Counters().add("slipstream_made_up")
    with pytest.raises(KeyError, match="no histogram"):
        Counters().observe("slipstream_requests_total", 1.0)
    for labels in ((), ("stop", "more")):
        with pytest.raises(KeyError, match="labels"):
            Counters().add(FINISHED, 1, labels)


def test_whole_totals_stay_exact_beyond_the_digits_of_a_float() -> None:
    counters = Counters()
    counters.add("slipstream_prompt_tokens_total", 2**53)
    for _ in range(3):
        counters.add("slipstream_prompt_tokens_total")
    assert counters.snapshot()["slipstream_prompt_tokens_total"] == 2**53 + 3


def test_a_counter_with_labels_has_its_sum_under_its_name() -> None:
    counters = Counters()
    counters.add(FINISHED, 2, ("stop",))
    counters.add(FINISHED, 3, ("length",))
    assert counters.snapshot() == {
        FINISHED: 5,
        f'{FINISHED}{{finish_reason="stop"}}': 2,
        f'{FINISHED}{{finish_reason="length"}}': 3,
    }


def test_series_of_a_gauge_end_when_it_is_replaced() -> None:
    counters = Counters()
    counters.replace("slipstream_kv_blocks", {("free",): 3, ("held",): 1})
    counters.replace("slipstream_kv_blocks", {("free",): 4})
    assert counters.snapshot() == {'slipstream_kv_blocks{state="free"}': 4}


@given(values=st.lists(st.tuples(st.floats(0, 300), st.integers(1, 5)), max_size=50))
def test_a_value_is_in_the_first_bucket_whose_end_it_does_not_exceed(values: list[tuple[float, int]]) -> None:
    counters = Counters()
    for value, count in values:
        counters.observe(TTFT, value, count=count)
    ends = (*METRICS[TTFT].buckets, float("inf"))
    expected = [0] * len(ends)
    for value, count in values:
        expected[next(at for at, end in enumerate(ends) if value <= end)] += count
    found = [histogram for _, _, histogram in counters.histograms()]
    assert [histogram.counts for histogram in found] == ([expected] if values else [])
    assert all(histogram.count == sum(expected) for histogram in found)
    if found:
        assert found[0].sum == pytest.approx(sum(value * count for value, count in values))

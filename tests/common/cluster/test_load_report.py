"""What is left of a load report that a process made up."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster.load_report import LEAST_FIGURE, MAX_AMOUNT, MAX_REQUESTS, keep_plausible
from slipstream.v1 import worker_pb2

FIELDS = worker_pb2.LoadReport.DESCRIPTOR.fields
KINDS: dict[int, st.SearchStrategy[Any]] = {
    1: st.floats(),
    4: st.integers(0, 2**64 - 1),
    8: st.booleans(),
    13: st.integers(0, 2**32 - 1),
}
REPORTS = st.fixed_dictionaries({}, optional={field.name: KINDS[field.type] for field in FIELDS}).map(
    lambda fields: worker_pb2.LoadReport(**fields)
)


@given(REPORTS, REPORTS)
def test_figures_are_amounts_whose_sums_and_inverses_are_finite(
    one: worker_pb2.LoadReport, other: worker_pb2.LoadReport
) -> None:
    is_draining, sequence = one.draining, one.sequence
    for report in (keep_plausible(one), keep_plausible(other)):
        for field, value in report.ListFields():
            assert value >= 0 and math.isfinite(value), field.name
            if field.type == 1:
                assert value == 0 or (value >= LEAST_FIGURE and math.isfinite(1e3 / value)), field.name
            if field.name.endswith("_share"):
                assert value <= 1
    assert (one.draining, one.sequence) == (is_draining, sequence)
    requests = one.requests_running + one.requests_waiting + one.handoffs
    assert requests * 1024 < 1 << 32, "of a whole fleet"
    assert (one.prefill_tokens_in_flight + one.decode_tokens_in_flight) * 1024 < 1 << 63


def test_what_is_no_amount_counts_as_none_and_too_much_as_the_most() -> None:
    for value, kept in ((math.nan, 0), (-1.0, 0), (LEAST_FIGURE / 2, 0), (2.0, 1), (math.inf, 1)):
        assert keep_plausible(worker_pb2.LoadReport(busy_share=value)).busy_share == kept
    assert keep_plausible(worker_pb2.LoadReport(requests_running=1 << 31)).requests_running == MAX_REQUESTS
    assert keep_plausible(worker_pb2.LoadReport(blocks_free=1 << 63)).blocks_free == MAX_AMOUNT


def test_the_figures_of_an_honest_report_stay() -> None:
    fields: dict[str, Any] = {field.name: 0.5 if field.type == 1 else 1 for field in FIELDS}
    report = worker_pb2.LoadReport(**fields)
    assert keep_plausible(worker_pb2.LoadReport(**fields)) == report

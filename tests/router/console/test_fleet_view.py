"""The speed that the fleet view shows of a worker."""

from __future__ import annotations

import pytest

from services.router.console.fleet_view import tokens_per_s
from slipstream.v1 import worker_pb2


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (worker_pb2.LoadReport(prefill_tokens_per_s=900.0), 0.0),  # of the last prompt; none runs
        (worker_pb2.LoadReport(prefill_tokens_per_s=900.0, requests_running=1), 900.0),
        (worker_pb2.LoadReport(decode_step_ms=20.0), 0.0),
        (worker_pb2.LoadReport(decode_step_ms=20.0, requests_running=3), 150.0),
    ],
)
def test_an_idle_worker_has_no_speed(report: worker_pb2.LoadReport, expected: float) -> None:
    assert tokens_per_s(report) == expected

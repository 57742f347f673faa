"""The speed that the fleet view shows of a worker."""

from __future__ import annotations

import pytest

from services.router.console.fleet_view import load_json
from slipstream.v1 import worker_pb2

# What steps of a worker took lately, which placement uses: no measure of the work that the worker does now.
SPEEDS = worker_pb2.LoadReport(prefill_tokens_per_s=8669.0, decode_step_ms=20.0, requests_running=3)


@pytest.mark.parametrize(
    ("prompt_tokens_per_s", "generated_tokens_per_s"),
    [(0.0, 0.0), (900.0, 2.0), (0.0, 303.0), (40.0, 303.0)],  # the last one computes short prompts itself
)
def test_the_speed_of_a_worker_is_that_of_its_work(
    prompt_tokens_per_s: float, generated_tokens_per_s: float
) -> None:
    report = worker_pb2.LoadReport(
        prompt_tokens_per_s=prompt_tokens_per_s, generated_tokens_per_s=generated_tokens_per_s
    )
    report.MergeFrom(SPEEDS)
    assert load_json(report)["tokens_per_s"] == prompt_tokens_per_s + generated_tokens_per_s

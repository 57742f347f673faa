"""The figures that the fleet view shows of a worker."""

from __future__ import annotations

import pytest

from libs.common.cluster.worker_record import Role, Worker
from services.router.console.fleet_view import load_json, store_load
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


def test_a_store_shows_its_bytes_as_far_as_they_are_known() -> None:
    store = Worker(Role.KVSTORE, "kvstore-0", "127.0.0.1:1", "1", capacity={"dram_bytes": 8})
    status = worker_pb2.GetStatusResponse(counters={"slipstream_kvstore_bytes_dram": 3.0})
    for known, used in ((None, None), (status, 3.0)):
        assert store_load(store, known) == {
            "memory_bytes_total": 8,
            "memory_bytes_used": used,
            "disk_bytes_total": None,
            "disk_bytes_used": None,
        }
    assert store_load(Worker(Role.DECODE, "decode-0", "127.0.0.1:1", "1"), status) == {}

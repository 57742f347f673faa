"""The statistics that a request reports at its end."""

from __future__ import annotations

import pytest

from libs.common.telemetry.counters import Counters
from services.router.execution.attempt_types import TokenBatch
from services.router.execution.request_stats import StatsRecorder
from slipstream.v1 import common_pb2, decode_pb2, router_pb2


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def stats(generated: int, steps: int, drafted: int, accepted: int) -> decode_pb2.SequenceStats:
    return decode_pb2.SequenceStats(
        generated_tokens=generated,
        decode_steps=steps,
        drafted_steps=drafted,
        proposed_drafts=2 * drafted,
        accepted_drafts=accepted,
        kv_bytes_pulled=100,
    )


def test_statistics_of_all_attempts_are_summed_without_changing_them() -> None:
    recorder, first = StatsRecorder(Clock(), began_s=9.0), stats(10, 8, 4, 2)
    recorder.observe(TokenBatch([1], stats=first))
    recorder.add_stats(None)
    recorder.add_stats(stats(20, 16, 8, 6))
    trace = recorder.message(30)
    assert (trace.decode_steps, trace.drafted_steps) == (24, 12)
    assert (trace.proposed_drafts, trace.accepted_drafts, trace.kv_bytes_pulled) == (24, 8, 200)
    assert trace.acceptance_length == pytest.approx(1 + 8 / 12)
    assert first == stats(10, 8, 4, 2)


def test_times_run_from_arrival_to_the_first_and_last_token() -> None:
    clock = Clock()
    recorder = StatsRecorder(clock, began_s=9.0)
    recorder.observe(TokenBatch([1]))
    clock.now_s = 12.0
    recorder.observe(TokenBatch([2]))
    clock.now_s = 15.0
    recorder.observe(TokenBatch([]))  # no token
    trace = recorder.message(2)
    assert (trace.ttft_ms, trace.decode_ms) == (1000.0, 2000.0)
    assert (trace.decode_steps, trace.acceptance_length) == (0, 0.0)


def test_each_token_is_counted_with_its_share_of_the_time_since_the_last_frame() -> None:
    clock, counters = Clock(), Counters()
    recorder = StatsRecorder(clock, began_s=9.0, admitted_s=9.5, counters=counters)
    recorder.observe(TokenBatch([1]))
    clock.now_s = 10.5
    recorder.observe(TokenBatch([2, 3, 4, 5]))
    usage = router_pb2.Usage(prompt_tokens=64, cached_tokens=60, completion_tokens=5)
    recorder.finish(usage, finish_reason="stop")
    values = counters.snapshot()
    of = {
        "time_to_first_token": (1, 1.0),
        "request_prefill": (1, 0.5),
        "inter_token_latency": (4, 0.5),
        "request_decode": (1, 0.5),
        "request_duration": (1, 1.5),
    }
    for name, (count, total_s) in of.items():
        assert values[f"slipstream_{name}_seconds_count"] == count, name
        assert values[f"slipstream_{name}_seconds_sum"] == total_s, name
    tokens = ("prompt_tokens_total", "cached_tokens_total", "completion_tokens_total")
    assert [values[f"slipstream_{name}"] for name in tokens] == [64, 60, 5]


def test_cached_tokens_never_exceed_the_prompt_and_are_those_of_the_first_attempt() -> None:
    recorder = StatsRecorder(Clock(), began_s=9.0)
    recorder.attempts = 1
    recorder.observe(
        TokenBatch([1], cached=[common_pb2.CachedTokens(tokens=64), common_pb2.CachedTokens(tokens=32)])
    )
    recorder.attempts = 2
    again = stats(1, 1, 0, 0)
    again.cached.add(tokens=500)
    recorder.add_stats(again)
    usage = recorder.usage(prompt_tokens=80, completion_tokens=2, reasoning_tokens=1)
    assert (usage.cached_tokens, [item.tokens for item in usage.cached]) == (80, [64, 32])


def test_the_first_token_of_a_job_counts_in_no_time_to_first_token() -> None:
    counters = Counters()
    recorder = StatsRecorder(Clock(), began_s=9.0, counters=counters, is_job=True)
    recorder.observe(TokenBatch([1]))
    values = counters.snapshot()
    assert "slipstream_time_to_first_token_seconds_count" not in values
    assert "slipstream_request_prefill_seconds_count" not in values
    assert recorder.ttft_ms == 1000.0

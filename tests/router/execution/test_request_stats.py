"""The statistics that a request reports at its end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.telemetry.counters import Counters
from services.router.execution.attempt_types import TokenBatch
from services.router.execution.request_stats import CountedTokens, StatsRecorder, count_end, is_cancelled
from services.router.placement.types import PlacementDecision
from services.router.recording.recorder import RequestRecorder
from slipstream import errors
from slipstream.v1 import common_pb2, decode_pb2


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


def cached(*n_tokens: int) -> list[common_pb2.CachedTokens]:
    return [common_pb2.CachedTokens(tokens=n) for n in n_tokens]


def totals(counters: Counters) -> tuple[float, ...]:
    """The counters of tokens: of prompts, cached ones, and of answers."""
    return tuple(
        counters.total(f"slipstream_{kind}_tokens_total") for kind in ("prompt", "cached", "completion")
    )


def test_statistics_of_all_attempts_are_summed_without_changing_them() -> None:
    recorder, first = StatsRecorder(Clock(), began_s=9.0), stats(10, 8, 4, 2)
    recorder.observe(TokenBatch([1], stats=first), answer_tokens=1)
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
    recorder.observe(TokenBatch([1]), answer_tokens=1)
    clock.now_s = 12.0
    recorder.observe(TokenBatch([2]), answer_tokens=2)
    clock.now_s = 15.0
    recorder.observe(TokenBatch([]), answer_tokens=2)  # no token
    trace = recorder.message(2)
    assert (trace.ttft_ms, trace.decode_ms) == (1000.0, 2000.0)
    assert (trace.decode_steps, trace.acceptance_length) == (0, 0.0)


def test_each_token_is_counted_with_its_share_of_the_time_since_the_last_frame() -> None:
    clock, counters = Clock(), Counters()
    recorder = StatsRecorder(clock, began_s=9.0, admitted_s=9.5, counters=counters, prompt_tokens=64)
    recorder.observe(TokenBatch([1], cached=cached(60)), answer_tokens=1)
    clock.now_s = 10.5
    recorder.observe(TokenBatch([2, 3, 4, 5]), answer_tokens=5)
    recorder.finish(recorder.usage(completion_tokens=5, reasoning_tokens=0), finish_reason="stop")
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
    assert totals(counters) == (64, 60, 5)


def test_tokens_count_as_they_arrive_also_those_of_a_request_that_does_not_finish() -> None:
    counters = Counters()
    recorder = StatsRecorder(Clock(), began_s=9.0, counters=counters, prompt_tokens=64)
    assert totals(counters) == (0, 0, 0)
    recorder.observe(TokenBatch([1], cached=cached(32)), answer_tokens=1)
    assert totals(counters) == (64, 32, 1)
    recorder.observe(TokenBatch([2, 3]), answer_tokens=1)  # its client has not taken them
    recorder.observe(TokenBatch([4]), answer_tokens=4)
    assert totals(counters) == (64, 32, 4)


def test_cached_tokens_that_decode_finds_count_when_it_states_them() -> None:
    counters = Counters()
    recorder = StatsRecorder(Clock(), began_s=9.0, counters=counters, prompt_tokens=64)
    recorder.observe(TokenBatch([1]), answer_tokens=1)
    assert totals(counters) == (64, 0, 1)
    recorder.add_stats(decode_pb2.SequenceStats(cached=cached(48)))
    recorder.finish(recorder.usage(completion_tokens=1, reasoning_tokens=0), finish_reason="stop")
    assert totals(counters) == (64, 48, 1)


def test_the_token_behind_a_prompt_alone_does_not_count() -> None:
    counters = Counters()
    recorder = StatsRecorder(Clock(), began_s=9.0, counters=counters, prompt_tokens=8, is_prompt_alone=True)
    recorder.observe(TokenBatch([1]), answer_tokens=1)
    recorder.count_answer(1)
    assert totals(counters) == (8, 0, 0)


def test_an_answer_that_resumes_counts_what_its_first_router_did_not() -> None:
    counters = Counters()
    recorder = StatsRecorder(Clock(), began_s=9.0, counters=counters, prompt_tokens=64, resume_after_tokens=5)
    recorder.observe(TokenBatch([1, 2, 3, 4], cached=cached(32)), answer_tokens=4)
    assert totals(counters) == (0, 0, 0)
    recorder.observe(TokenBatch([5, 6, 7]), answer_tokens=7)
    usage = recorder.usage(completion_tokens=7, reasoning_tokens=0)
    recorder.finish(usage, finish_reason="stop")
    assert totals(counters) == (0, 0, 2)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (64, 32, 7)


@given(
    prompt_tokens=st.integers(1, 50),
    n_cached=st.lists(st.integers(0, 80), min_size=1, max_size=4),
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_each_token_of_a_request_that_restarts_counts_once(
    prompt_tokens: int, n_cached: list[int], lengths: list[list[int]]
) -> None:
    """Each list of `lengths` has the batches of one start; the next start makes the same answer again."""
    counters, counted, longest = Counters(), CountedTokens(), 0
    for index, batches in enumerate(lengths):
        recorder = StatsRecorder(
            Clock(), began_s=9.0, counters=counters, prompt_tokens=prompt_tokens, counted=counted
        )
        n_tokens, tokens = 0, cached(n_cached[index % len(n_cached)])
        for length in batches:
            n_tokens += length
            recorder.observe(TokenBatch([0] * length, cached=tokens), answer_tokens=n_tokens)
        longest = max(longest, n_tokens)
        prompt, found, answer = totals(counters)
        assert (prompt, answer) == (prompt_tokens, longest)
        assert recorder.usage(completion_tokens=0, reasoning_tokens=0).cached_tokens <= found <= prompt_tokens


def test_cached_tokens_never_exceed_the_prompt_and_are_those_of_the_first_attempt() -> None:
    recorder = StatsRecorder(Clock(), began_s=9.0, prompt_tokens=80)
    recorder.attempts = 1
    recorder.observe(TokenBatch([1], cached=cached(64, 32)), answer_tokens=1)
    recorder.attempts = 2
    again = stats(1, 1, 0, 0)
    again.cached.add(tokens=500)
    recorder.add_stats(again)
    usage = recorder.usage(completion_tokens=2, reasoning_tokens=1)
    assert (usage.cached_tokens, [item.tokens for item in usage.cached]) == (80, [64, 32])


@pytest.mark.parametrize(("prefill", "source"), [("prefill-0", "prefill"), ("", "decode")])
def test_cached_tokens_of_own_pages_are_those_of_the_worker_that_computed_the_prompt(
    prefill: str, source: str
) -> None:
    recorded = RequestRecorder(clock=Clock(), wall_clock_s=Clock())
    timeline = recorded.begin("r", began_s=9.0, tenant="t", session=None, model="m", endpoint="e")
    recorder = StatsRecorder(Clock(), began_s=9.0, timeline=timeline, prompt_tokens=96)
    recorder.attempts = 1
    recorder.placed(PlacementDecision(prefill, "decode-0", "", "worker", ""), transport="socket")
    recorder.observe(TokenBatch([1]), answer_tokens=1)
    found = [
        common_pb2.CachedTokens(tier=common_pb2.CACHE_TIER_WORKER, tokens=64),
        common_pb2.CachedTokens(tier=common_pb2.CACHE_TIER_DRAM, tokens=16),
    ]
    recorder.add_stats(decode_pb2.SequenceStats(cached=found))
    recorder.attempts = 2  # the answer goes on at other workers
    recorder.placed(PlacementDecision("prefill-1", "decode-1", "", "worker", ""), transport="socket")
    recorder.finish(recorder.usage(completion_tokens=1, reasoning_tokens=0), finish_reason="stop")
    assert recorded.cached_tokens == {source: 64, "dram": 16}


def test_the_first_token_of_a_job_counts_in_no_time_to_first_token() -> None:
    counters = Counters()
    recorder = StatsRecorder(Clock(), began_s=9.0, counters=counters, is_job=True)
    recorder.observe(TokenBatch([1]), answer_tokens=1)
    values = counters.snapshot()
    assert "slipstream_time_to_first_token_seconds_count" not in values
    assert "slipstream_request_prefill_seconds_count" not in values
    assert recorder.ttft_ms == 1000.0


@pytest.mark.parametrize(
    ("error", "goes_on", "counter"),
    [
        (errors.Aborted("gone"), False, "aborted"),
        (errors.Unauthenticated("revoked"), False, "aborted"),
        (errors.Draining("stopping"), True, "aborted"),
        (errors.Draining("stopping"), False, "failed"),
        (errors.Unavailable("no worker"), True, "failed"),
        (errors.Overloaded("busy"), False, "refused"),
    ],
)
def test_an_end_counts_once_by_what_its_client_sees(
    error: errors.SlipstreamError, goes_on: bool, counter: str
) -> None:
    counters = Counters()
    count_end(counters, error, goes_on=goes_on)
    count_end(counters, None, goes_on=goes_on)
    assert counters.snapshot() == {f"slipstream_requests_{counter}_total": 1}
    assert is_cancelled(error, goes_on=goes_on) == (counter == "aborted")

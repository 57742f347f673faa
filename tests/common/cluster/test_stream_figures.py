"""What is left of the figures that a worker made up in its stream messages."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster.stream_figures import (
    MAX_CACHED_ENTRIES,
    MAX_STEP_DRAFTS,
    MAX_STEPS,
    MAX_TIME_MS,
    keep_plausible_delta,
    keep_plausible_event,
)
from slipstream.v1 import common_pb2, decode_pb2, prefill_pb2

UINT32 = st.integers(0, 2**32 - 1)
TIMES_MS = st.floats(width=32)
CACHED = st.lists(st.builds(common_pb2.CachedTokens, tier=st.integers(0, 6), tokens=UINT32), max_size=40)
COUNTS = ("generated_tokens", "decode_steps", "drafted_steps", "proposed_drafts", "accepted_drafts")
STATS = st.builds(
    decode_pb2.SequenceStats,
    **dict.fromkeys((*COUNTS, "draft_waits_missed"), UINT32),
    kv_bytes_pulled=st.integers(0, 2**64 - 1),
    transfer_ms=TIMES_MS,
    cached=CACHED,
)
FIRST_TOKENS = st.builds(prefill_pb2.FirstToken, cached=CACHED, queue_ms=TIMES_MS, compute_ms=TIMES_MS)


def assert_within(prompt_tokens: int, cached: Any, *times_ms: float) -> None:
    assert sum(item.tokens for item in cached) <= prompt_tokens
    assert len(cached) <= MAX_CACHED_ENTRIES
    assert all(0 <= time_ms <= MAX_TIME_MS for time_ms in times_ms)


@given(FIRST_TOKENS, UINT32, st.integers(0, 2**21))
def test_the_figures_of_a_prefill_worker_stay_within_the_prompt(
    first: prefill_pb2.FirstToken, computed_tokens: int, prompt_tokens: int
) -> None:
    event = prefill_pb2.PrefillEvent(first_token=first)
    keep_plausible_event(event, prompt_tokens=prompt_tokens)
    first = event.first_token
    assert_within(prompt_tokens, first.cached, first.queue_ms, first.compute_ms)
    opened = prefill_pb2.PrefillEvent(opened=prefill_pb2.HandoffOpened(cached=first.cached))
    opened.opened.cached.add(tokens=computed_tokens)
    keep_plausible_event(opened, prompt_tokens=prompt_tokens)
    assert_within(prompt_tokens, opened.opened.cached)
    progress = prefill_pb2.PrefillEvent()
    progress.progress.computed_tokens = computed_tokens
    keep_plausible_event(progress, prompt_tokens=prompt_tokens)
    assert progress.progress.computed_tokens == min(computed_tokens, prompt_tokens)


@given(STATS, CACHED, TIMES_MS, st.integers(0, 2**21))
def test_the_figures_of_a_decode_worker_add_up(
    stats: decode_pb2.SequenceStats, cached: Any, restore_ms: float, prompt_tokens: int
) -> None:
    start = decode_pb2.PromptStart(cached=cached, restore_ms=restore_ms)
    delta = decode_pb2.SequenceDelta(
        finish_reason=common_pb2.FINISH_REASON_STOP, stats=stats, prompt_start=start
    )
    keep_plausible_delta(delta, prompt_tokens=prompt_tokens)
    start, stats = delta.prompt_start, delta.stats
    assert_within(prompt_tokens, start.cached, start.restore_ms)
    assert_within(prompt_tokens, stats.cached, stats.transfer_ms)
    assert all(getattr(stats, name) <= MAX_STEPS for name in COUNTS)
    assert stats.accepted_drafts <= stats.proposed_drafts
    assert stats.proposed_drafts <= stats.drafted_steps * MAX_STEP_DRAFTS
    assert stats.drafted_steps <= stats.decode_steps
    assert math.isfinite(stats.accepted_drafts / max(stats.drafted_steps, 1))


def test_honest_figures_stay_and_statistics_come_with_the_end_alone() -> None:
    cached = [
        common_pb2.CachedTokens(tier=tier, tokens=64)
        for tier in (common_pb2.CACHE_TIER_DRAM, common_pb2.CACHE_TIER_NVME)
    ]
    counts = dict.fromkeys(COUNTS, 40) | {"accepted_drafts": 30}
    stats = decode_pb2.SequenceStats(**counts, kv_bytes_pulled=1 << 30, transfer_ms=4.5, cached=cached)
    delta = decode_pb2.SequenceDelta(finish_reason=common_pb2.FINISH_REASON_STOP, stats=stats)
    keep_plausible_delta(delta, prompt_tokens=128)
    assert delta.stats == stats
    first = prefill_pb2.FirstToken(token_id=7, cached=cached, queue_ms=1.5, compute_ms=20)
    event = prefill_pb2.PrefillEvent(first_token=first)
    keep_plausible_event(event, prompt_tokens=128)
    assert event.first_token == first
    early = decode_pb2.SequenceDelta(stats=stats)
    keep_plausible_delta(early, prompt_tokens=128)
    assert not early.HasField("stats")

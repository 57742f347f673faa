"""StepStats: numbers and rates of prefilled and decoded tokens."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from libs.common.telemetry.counters import Counters
from libs.engine.step.types import StepOutput
from libs.worker.engine.step_stats import StepStats


def test_prefill_and_decode_are_counted_separately() -> None:
    counters = Counters()
    stats = StepStats(counters)
    stats.open("p", computed_tokens=64, prefilling=True)
    stats.open("d", computed_tokens=10, prefilling=False)
    stats.record([StepOutput("p", (), 164), StepOutput("d", (1,), 11), StepOutput("unknown", (1,), 5)], 50.0)
    assert stats.prefill_tokens_per_s == 2000.0
    assert stats.decode_step_ms == 50.0
    stats.record([StepOutput("p", (5,), 200)], 18.0)
    stats.record([StepOutput("p", (6, 7), 202, proposed_drafts=3, accepted_drafts=1)], 10.0)
    values = counters.snapshot()
    assert stats.busy_ms == 78.0
    assert values["slipstream_prefill_tokens_total"] == 136
    assert values["slipstream_engine_step_seconds_count"] == 3
    assert values["slipstream_decode_step_seconds_count"] == 2
    assert values["slipstream_decode_step_seconds_sum"] == pytest.approx(0.06)
    assert "slipstream_draft_wait_seconds_count" not in values  # there is no drafter
    assert values["slipstream_draft_tokens_proposed_total"] == 3
    assert values["slipstream_draft_tokens_accepted_total"] == 1
    assert values["slipstream_drafts_verified_total"] == 1
    positions = "slipstream_draft_tokens_accepted_by_position_total"
    assert [labels for name, labels, _ in counters.values() if name == positions] == [("0",)]
    stats.close("p")
    stats.record([StepOutput("p", (8,), 203)], 10.0)
    assert counters.snapshot()["slipstream_decode_step_seconds_count"] == 2


_LONG, _SHORT = (1000, 100.0), (10, 5.0)  # prompts of 10,000 and of 2,000 tokens a second


def prefill_rate(prompts: Iterable[tuple[int, float]]) -> float:
    """After steps of so many prompt tokens and milliseconds each."""
    stats = StepStats(Counters())
    for number, (n_tokens, step_ms) in enumerate(prompts):
        stats.open(f"p{number}", computed_tokens=0, prefilling=True)
        stats.record([StepOutput(f"p{number}", (1,), n_tokens)], step_ms)
    return stats.prefill_tokens_per_s


def test_short_prompts_hardly_lower_the_rate_of_prefill() -> None:
    assert 9_000 < prefill_rate([_LONG, _SHORT] * 50) < 10_000  # the mean of their rates is 6,000
    assert 9_000 < prefill_rate([_LONG] + [_SHORT] * 100) < 10_000


def test_the_rate_of_prefill_follows_long_prompts_at_once_and_short_ones_slowly() -> None:
    assert prefill_rate([_SHORT] * 100) == pytest.approx(2_000)
    assert prefill_rate([_SHORT] * 100 + [_LONG]) == pytest.approx(10_000)
    assert prefill_rate([_LONG] + [_SHORT] * 20_000) < 3_000
    assert prefill_rate([_LONG] + [(1000, 200.0)] * 30) < 6_000


def test_the_wait_for_drafts_counts_for_steps_that_decode() -> None:
    counters = Counters()
    stats = StepStats(counters)
    stats.open("p", computed_tokens=0, prefilling=True)
    stats.open("d", computed_tokens=10, prefilling=False)
    stats.record([StepOutput("p", (), 64)], 5.0, draft_wait_ms=3.0)
    stats.record([StepOutput("d", (1,), 11)], 5.0, draft_wait_ms=4.0)
    values = counters.snapshot()
    assert values["slipstream_draft_wait_seconds_count"] == 1
    assert values["slipstream_draft_wait_seconds_sum"] == 0.004

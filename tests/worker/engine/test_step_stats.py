"""StepStats: numbers and rates of prefilled and decoded tokens."""

from __future__ import annotations

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
    assert values["slipstream_decode_steps_total"] == 2
    assert values["slipstream_draft_tokens_proposed_total"] == 3
    assert values["slipstream_draft_tokens_accepted_total"] == 1
    stats.close("p")
    stats.record([StepOutput("p", (8,), 203)], 10.0)
    assert counters.snapshot() == values

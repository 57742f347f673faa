"""What a sequence's setup costs a token, steps that rest included."""

from __future__ import annotations

import pytest

from libs.engine.step.types import StepOutput
from services.decode.draft_control import DraftControl
from services.decode.draft_gate import DraftGate, DraftMode


def test_a_setup_is_spread_over_all_tokens_of_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms, recorded, n_rested = 0.0, list[tuple[float, int]](), 0
    gate = DraftGate()
    monkeypatch.setattr(DraftGate, "record_setup", lambda _, *of: recorded.append(of))
    control = DraftControl(gate, lambda: now_ms)
    control.open("a", n_rows=0, context_tokens=100)
    n_steps = 1_000
    for step in range(n_steps):
        if control.is_resting:
            n_rested += 1
        else:
            control.begin(available=True)
        if step == 0:
            control.add_setup(["a"], 500.0)
        now_ms += 10.0 if control.mode is DraftMode.OFF else 30.0
        if control.rests_on():
            continue
        has_drafts = control.mode is DraftMode.ON
        ends = control.end([StepOutput("a", (1,), 101 + step)], int(has_drafts))
        if control.mode is DraftMode.OFF and not ends:
            control.rest()
    control.close("a")
    assert n_rested > n_steps / 2
    assert recorded == [(500.0, n_steps)]

"""What the gate is given: whole steps while the same sequences run, setups apart."""

from __future__ import annotations

import numpy as np
import pytest

from libs.engine.step.draft_head import ContextRows
from libs.engine.step.types import FEATURE_WINDOW_TOKENS, StepOutput
from services.decode.draft_control import WHOLE_ROWS, DraftControl
from services.decode.draft_gate import DraftGate, DraftMode
from services.decode.draft_state import DraftLimits
from services.decode.speculation import RemoteSpeculation
from services.decode.step_costs import DEFAULT_CONFIDENCE, SetupCosts, StepWindow, least_confidence


class Recorder(DraftGate):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[float, int]] = []

    def record(  # type: ignore[no-untyped-def]
        self, mode, n_sequences, context_tokens, *, elapsed_ms, n_tokens, n_drafts=0, setup_ms=0.0
    ) -> None:
        self.given.append((elapsed_ms, n_tokens))


class Clock:
    now_ms = 0.0

    def __call__(self) -> float:
        return self.now_ms


def output(seq_id: str, *, with_features: bool = True, finish: bool = False) -> StepOutput:
    features = np.zeros((1, 4), np.float32) if with_features else None
    return StepOutput(seq_id, (1,), 10, features=features, finish="stop" if finish else None)


def step(control: DraftControl, clock: Clock, outputs: list[StepOutput], *, setup_ms: float = 0.0) -> None:
    """2 ms after the last step's end it begins, and takes 3 ms beside the setup."""
    clock.now_ms += 2
    control.begin(available=True)
    if setup_ms:
        control.add_setup([outputs[0].seq_id], setup_ms)
    clock.now_ms += 3 + setup_ms
    control.end(outputs, 0)


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    gate, clock = Recorder(), Clock()
    control = DraftControl(gate, clock)
    control.open("a", n_rows=5, context_tokens=5)
    step(control, clock, [output("a")])
    step(control, clock, [output("a")], setup_ms=50)
    step(control, clock, [output("a", finish=True)])
    control.close("a")
    assert gate.setup.ms_per_token == 50 / 3
    clock.now_ms += 1000  # idle
    control.open("b", n_rows=5, context_tokens=5)
    step(control, clock, [output("b")])
    control.open("c", n_rows=5, context_tokens=5)
    step(control, clock, [output("b")])  # "c" had no row
    assert gate.given == [(3, 1), (5, 1), (5, 1), (3, 1)]


def test_a_context_is_whole_again_after_enough_rows() -> None:
    control = DraftControl(None, Clock())
    control.open("a", n_rows=5, context_tokens=5)
    (sequence,) = control._running.values()
    step(control, Clock(), [output("a")])
    assert sequence.is_whole
    step(control, Clock(), [output("a", with_features=False)])
    for n_rows in range(WHOLE_ROWS):
        assert not sequence.is_whole, n_rows
        step(control, Clock(), [output("a")])
    assert sequence.is_whole


def test_a_step_is_plain_without_drafter_or_sequence() -> None:
    control = DraftControl(None, Clock())
    assert control.begin(available=True) is DraftMode.OFF
    control.open("a", n_rows=5, context_tokens=5)
    assert control.begin(available=False) is DraftMode.OFF
    assert control.begin(available=True) is DraftMode.ON


def test_a_prompt_brings_rows_where_its_sequence_may_have_drafts() -> None:
    control = DraftControl(DraftGate(is_forced=True), Clock())
    assert control.prompt_rows(100) == FEATURE_WINDOW_TOKENS
    assert DraftControl(DraftGate(), Clock()).prompt_rows(100) == 0


@pytest.mark.parametrize(
    ("n_rows", "context_tokens", "is_whole"),
    [(0, 0, False), (0, 300, False), (60, 60, True), (60, 300, False), (WHOLE_ROWS, 300, True)],
)
def test_a_prompt_is_whole_with_all_its_rows_or_enough(
    n_rows: int, context_tokens: int, is_whole: bool
) -> None:
    control = DraftControl(None, Clock())
    control.open("a", n_rows=n_rows, context_tokens=context_tokens)
    (sequence,) = control._running.values()
    assert sequence.is_whole is is_whole


async def test_closed_nothing_is_computed_kept_or_sent() -> None:
    async def find() -> str | None:
        return None

    speculation = RemoteSpeculation(find, DraftLimits(), gate=DraftGate())
    speculation._state.connect()
    speculation.open("a", ContextRows("a", 0, np.array([1], np.uint32), np.zeros((1, 4), np.float32)))
    assert speculation.drafts() == {}
    assert not speculation.wants_features
    speculation.stepped([output("a", with_features=False)])
    assert speculation._state.pop_message(0.0) is None
    speculation._state.pause(False)
    assert speculation._state.pop_message(0.0) is None  # the prompt's rows no longer follow on


@pytest.mark.parametrize(("row_ms", "expected"), [(0.0, 0.1), (0.5, 0.5), (5.0, 0.7)])
def test_a_draft_is_worth_a_share_of_a_token(row_ms: float, expected: float) -> None:
    window = StepWindow(64)
    for n_drafts in (0, 1, 2, 3) * 4:
        window.add(2.0 - 0.75 * 2 * row_ms + row_ms * n_drafts + 10 * (row_ms > 1), 2.0, n_drafts)
    assert window.cost_ms == pytest.approx(1.0, rel=0.2) or row_ms > 1
    assert least_confidence(window, 1) == pytest.approx(expected, abs=0.06)
    assert least_confidence(None, 1) == DEFAULT_CONFIDENCE


def test_the_cost_of_a_draft_is_unknown_where_steps_hardly_differ() -> None:
    window = StepWindow(4)
    assert (window.draft_ms, window.median_ms, window.is_full) == (None, 0.0, False)
    window.add(2.0, 1.0, 0)
    assert window.draft_ms is None
    window.add(2.5, 1.0, 1)
    assert (window.draft_ms, window.cost_ms) == pytest.approx((0.5, 2.25))
    assert least_confidence(window, 1) == pytest.approx(0.5 / 2.25)
    for elapsed_ms in (2.0, 3.0):
        window.add(elapsed_ms, 1.0, 1)
    assert (window.draft_ms, window.median_ms, window.is_full) == (None, 2.25, True)


def test_a_setup_is_shared_by_the_tokens_of_its_sequence() -> None:
    setup = SetupCosts()
    assert setup.ms_per_token == 0.0
    for n_tokens, expected_ms in ((0, 10.0), (1, 10.0), (40, 10.0), (40, 0.5)):
        setup.add(10.0, n_tokens)
        assert setup.ms_per_token == pytest.approx(expected_ms, rel=0.05)

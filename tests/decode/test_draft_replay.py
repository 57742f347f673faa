"""The gate behind DraftControl, while 16 streams end and begin: it opens soon, or stays closed cheaply."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.engine.step.types import StepOutput
from services.decode.draft_control import WHOLE_ROWS, DraftControl
from services.decode.draft_gate import DraftGate, DraftMode, GateLimits
from tests.support.examples import examples

N_DRAFTS = 3
_ROW = np.zeros((1, 1), np.float32)


@dataclass
class Stream:
    """A sequence at its decode worker. `is_fed`: the drafter knew its newest position before this step."""

    context: int
    left: int
    is_fed: bool = False
    has_all: bool = True  # the drafter has, or could have, all of its rows
    n_rows: int = 0  # with features, since the last step without them


@dataclass
class Replay:
    """`streams` clients, each with its next turn when the last one has ended; one prefill worker in front.

    A drafter hears of a sequence after its first step with drafts, and proposes from the second one on.
    """

    streams: int
    step_ms: float
    draft_step_ms: float
    prefill_ms: float = 30.0
    accepted: float = 2.0
    whole: float = 128.0  # rows from which drafts are as good as ever
    seed: int = 1
    rests: bool = True  # as both kinds of Speculation let steps rest
    answer_tokens: tuple[int, int] = 20, 160
    now_ms: float = 0.0
    modes: list[DraftMode] = field(default_factory=list)
    spent_ms: float = 0.0  # of steps
    tokens: float = 0.0  # of each running sequence
    n_measured: int = 0  # steps

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.control = DraftControl(DraftGate(), lambda: self.now_ms)
        self.running: dict[str, Stream] = {}
        self.ready_ms = [self.prefill_ms * (number + 1) for number in range(self.streams)]
        self.n_begun = 0

    def run(self, steps: int) -> list[DraftMode]:
        for _ in range(steps):
            self._arrive()
            self._step()
        return self.modes[-steps:]

    def _arrive(self) -> None:
        if not self.running:
            self.now_ms = max(self.now_ms, min(self.ready_ms))
        for ready_ms in [ready_ms for ready_ms in self.ready_ms if ready_ms <= self.now_ms]:
            self.ready_ms.remove(ready_ms)
            seq_id, context = f"{self.n_begun}", self.rng.randint(150, 600)
            self.n_begun += 1
            n_rows = self.control.prompt_rows(context)
            n_rows = min(n_rows, context)
            left = self.rng.randint(*self.answer_tokens)
            self.running[seq_id] = Stream(context, left, has_all=n_rows == context, n_rows=n_rows)
            self.control.open(seq_id, n_rows=n_rows, context_tokens=context)

    def _step(self) -> None:
        if self.control.is_resting:
            mode = DraftMode.OFF
        else:
            self._check_contexts()
            mode = self.control.begin(available=True)
            self.n_measured += 1
        outputs, n_drafts = [], 0
        for seq_id, stream in list(self.running.items()):
            has_drafts = mode is DraftMode.ON and stream.is_fed
            n_drafts += N_DRAFTS * has_drafts
            n_right = sum(self.rng.random() < self.accepted / N_DRAFTS for _ in range(N_DRAFTS * has_drafts))
            n_tokens = min(1 + n_right, stream.left)
            stream.left -= n_tokens
            stream.context += n_tokens
            stream.is_fed = mode is DraftMode.ON
            stream.has_all = stream.has_all and mode is not DraftMode.OFF
            stream.n_rows = 0 if mode is DraftMode.OFF else stream.n_rows + n_tokens
            features = None if mode is DraftMode.OFF else _ROW
            finish: Literal["stop"] | None = None if stream.left else "stop"
            outputs.append(
                StepOutput(seq_id, (1,) * n_tokens, stream.context, features=features, finish=finish)
            )
            self.tokens += n_tokens / len(self.running)
        step_ms = self.draft_step_ms if n_drafts else self.step_ms * (1.0 if mode is DraftMode.OFF else 1.05)
        step_ms *= self.rng.uniform(0.95, 1.05)
        self.now_ms += step_ms
        self.spent_ms += step_ms
        if not self.control.rests_on():
            has_ends = self.control.end(outputs, n_drafts)
            if self.rests and mode is DraftMode.OFF and not has_ends:
                self.control.rest()
        for output in outputs:
            if output.finish is not None:
                del self.running[output.seq_id]
                self.control.close(output.seq_id)
                self.ready_ms.append(max([*self.ready_ms, self.now_ms]) + self.prefill_ms)
        self.modes.append(mode)

    def _check_contexts(self) -> None:
        """A step that is measured knows which contexts are whole, whatever rested before it."""
        for seq_id, stream in self.running.items():
            known = self.control._running[seq_id]
            assert known.is_whole == (stream.has_all or stream.n_rows >= WHOLE_ROWS)
            assert abs(known.context_tokens - stream.context) <= GateLimits().rest_steps


# A prompt in 100 ms keeps about six of 16 clients decoding: the batch is of another size every few steps.
@pytest.mark.parametrize("prefill_ms", [5.0, 30.0, 100.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_gate_opens_within_300_steps_of_16_changing_streams(prefill_ms: float, seed: int) -> None:
    replay = Replay(16, 20.0, 26.0, prefill_ms=prefill_ms, seed=seed)
    replay.run(300)
    assert replay.run(300).count(DraftMode.ON) > 270


@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_a_gate_that_does_not_pay_stays_closed_at_little_cost(streams: int, seed: int) -> None:
    replay = Replay(streams, 4.0, 16.0, seed=seed)
    modes = replay.run(6000)
    assert modes.count(DraftMode.ON) < 200
    assert replay.spent_ms / replay.tokens < 1.02 * replay.step_ms


@pytest.mark.parametrize("streams", [1, 4, 16])
def test_most_steps_of_a_closed_gate_rest(streams: int) -> None:
    """With long answers, because each new sequence is measured. So are trials, and a window before each."""
    replay = Replay(streams, 4.0, 16.0, answer_tokens=(2000, 3000))
    replay.run(2000)
    before = replay.n_measured
    modes = replay.run(4000)
    assert DraftMode.ON in modes, "a trial came"
    assert replay.n_measured - before < 0.3 * len(modes)


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(1, 16), st.integers(0, 1000), st.integers(2, 400))
def test_rests_delay_no_trial(streams: int, seed: int, shortest: int) -> None:
    """Drafts begin to pay: the gate finds that as early as one that measures each step."""
    opened = []
    for rests in (False, True):
        replay = Replay(streams, 4.0, 16.0, seed=seed, rests=rests, answer_tokens=(shortest, 2 * shortest))
        replay.run(1500)
        replay.draft_step_ms, begun_ms = 4.4, replay.now_ms
        while replay.run(20).count(DraftMode.ON) < 20 and replay.now_ms < begun_ms + 200_000:
            pass
        opened.append(replay.now_ms)
    assert opened[1] < 1.25 * opened[0] + 2_000


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

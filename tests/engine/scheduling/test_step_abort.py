"""Step aborts: their condition, their limit, and that aborted steps change no state."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.core.engine import PagedEngine
from libs.engine.core.fake import FakeModel, build_fake_engine, expected_tokens
from libs.engine.scheduling.step_abort import MAX_CONSECUTIVE_ABORTS, StepAbort, should_abort
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.step_model import SequenceRows, StepResult
from libs.engine.step.stop_flag import StopFlag
from libs.engine.step.types import SamplingParams
from tests.engine.support import check_accounting, drive, make_spec

ROWS = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 512), min_size=1)
NAMES = st.sets(st.sampled_from("abcdef"))


@given(rows=ROWS, unwanted=NAMES, cuts=st.integers(0, 5))
def test_a_step_aborts_for_a_majority_of_unwanted_rows_and_a_limited_number_of_times(
    rows: dict[str, int], unwanted: set[str], cuts: int
) -> None:
    pays = should_abort(rows, unwanted, consecutive_aborts=cuts)
    wasted = sum(n for name, n in rows.items() if name in unwanted)
    wanted = sum(rows.values()) - wasted
    if rows.keys() <= unwanted:
        assert pays
    else:
        assert pays == (wasted > wanted and cuts < MAX_CONSECUTIVE_ABORTS)
    if pays:  # more unwanted sequences do not change the decision
        assert should_abort(rows, unwanted | {"f"}, consecutive_aborts=cuts)
        assert should_abort(rows, unwanted | set(rows), consecutive_aborts=cuts)


@given(st.lists(st.tuples(ROWS, NAMES), max_size=30))
def test_steps_with_wanted_rows_abort_a_limited_number_of_times_in_a_row(
    steps: list[tuple[dict[str, int], set[str]]],
) -> None:
    cut, in_row = StepAbort(), 0
    for rows, unwanted in steps:
        cut.begin(rows)
        for name in unwanted:
            cut.abandon(name)
        aborted = cut.flag.is_set
        cut.end(aborted=aborted)
        for name in unwanted:
            cut.remove(name)
        assert not cut.flag.is_set
        if not aborted:
            in_row = 0
        elif not rows.keys() <= unwanted:
            in_row += 1
        assert in_row <= MAX_CONSECUTIVE_ABORTS


def test_an_abort_flag_belongs_to_one_step() -> None:
    cut = StepAbort()
    cut.abandon("a")
    assert not cut.flag.is_set  # no step is running
    cut.begin({"a": 5, "b": 1})
    assert cut.flag.is_set  # the step is not computed at all
    cut.end(aborted=True)
    assert not cut.flag.is_set
    cut.remove("a")
    cut.begin({"a": 5, "b": 1})  # a new sequence with the same name
    assert not cut.flag.is_set
    cut.end(aborted=False)


def test_several_abandoned_sequences_form_a_majority_together() -> None:
    cut = StepAbort()
    cut.begin({"a": 2, "b": 2, "c": 3})
    cut.abandon("a")
    assert not cut.flag.is_set
    cut.abandon("b")
    assert cut.flag.is_set


class AbandoningModel(FakeModel):
    """A fake model that abandons sequences when a step reaches a given page."""

    def __init__(self, model: FakeModel) -> None:
        self.__dict__.update(model.__dict__)
        self.abandoned: tuple[str, ...] = ()
        self.engine: PagedEngine
        self.runs: list[dict[str, int]] = []

    def run(self, batch: ForwardBatch, rows: Sequence[SequenceRows], stop: StopFlag) -> StepResult:
        self.runs.append({r.seq_id: r.n_rows for r in rows})
        for r in rows[:-1]:
            self._compute(r, stop)  # these pages are written before the abort
        for seq_id in self.abandoned:
            self.engine.abandon(seq_id)
        return super().run(batch, rows, stop)


@pytest.fixture
def model() -> AbandoningModel:
    fake = build_fake_engine(n_pages=64, block_tokens=4, vocab_size=90, max_context_tokens=128).model
    assert isinstance(fake, FakeModel)
    model = AbandoningModel(fake)
    model.engine = PagedEngine(model, step_tokens=24)
    return model


def start(engine: PagedEngine, seq_id: str, prompt: list[int]) -> SamplingParams:
    spec = make_spec(seq_id, prompt, max_tokens=4, ignore_eos=True)
    engine.reserve(spec)
    engine.start(seq_id)
    return spec.sampling


def test_an_aborted_step_changes_no_state(model: AbandoningModel) -> None:
    engine = model.engine
    short, long = [1, 2, 3, 4, 5, 6], list(range(10, 70))
    params = start(engine, "short", short)
    start(engine, "long", long)
    engine.poll_block_changes()
    before = {s.spec.seq_id: (s.n_computed, s.n_tokens, s.last_slice) for s in engine.sequences()}
    ledger = engine.ledger()
    model.abandoned = ("long",)
    assert engine.step() == []
    assert engine.has_work()
    assert {s.spec.seq_id: (s.n_computed, s.n_tokens, s.last_slice) for s in engine.sequences()} == before
    assert engine.ledger() == ledger
    assert engine.poll_block_changes() == []
    model.abandoned = ()
    engine.release("long")
    transcript = drive(engine)
    assert transcript.tokens["short"] == expected_tokens(engine, short, params, n=4)
    assert model.runs[1] == {"short": 6}
    engine.release("short")
    check_accounting(engine)
    assert engine.ledger().pages_held == 0


def test_a_short_prompt_ends_although_every_step_has_a_cancelled_long_one(model: AbandoningModel) -> None:
    """Each step has a new long prompt that is cancelled while the step runs."""
    engine = model.engine
    params = start(engine, "short", [1, 2, 3])
    tokens: list[int] = []
    steps = 0
    while len(tokens) < 4:
        seq_id = f"long-{steps}"
        start(engine, seq_id, list(range(10, 70)))
        model.abandoned = (seq_id,)
        for output in engine.step():
            tokens += output.tokens if output.seq_id == "short" else ()
        engine.release(seq_id)
        steps += 1
        assert steps <= 4 * (MAX_CONSECUTIVE_ABORTS + 1)
    assert tokens == expected_tokens(engine, [1, 2, 3], params, n=4)
    assert steps == 4 * (MAX_CONSECUTIVE_ABORTS + 1)  # each step had an abandoned majority

"""Steps one ahead under random orders of calls: every stream is that of plain recomputation, no page is lost.

The device is as late as it may be, and sequences end by tokens that no one foresees. A row that ran after its
sequence's end must show nowhere: in no output, no page of another sequence, no count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from libs.engine.core.engine import PagedEngine
from libs.engine.core.fake import FakeModel, build_fake_engine, expected_tokens
from libs.engine.step.types import SamplingParams, SequenceSpec, StepOutput
from slipstream.errors import FailedPrecondition, OutOfPages
from tests.engine.core.deferred_model import DeferredModel
from tests.engine.core.pinning_machine import PinningMachine
from tests.engine.support import check_accounting

BLOCK = 4
CONTEXT = 24
VOCAB = 12  # few tokens, so that a stop token is common
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9], [1]]


def make_engine(*, n_pages: int, max_batch: int, feature_width: int = 0) -> tuple[PagedEngine, DeferredModel]:
    fake = build_fake_engine(
        n_pages=n_pages,
        block_tokens=BLOCK,
        vocab_size=VOCAB,
        max_context_tokens=CONTEXT,
        feature_width=feature_width,
        max_batch=max_batch,
    ).model
    assert isinstance(fake, FakeModel)
    model = DeferredModel(fake)
    return PagedEngine(model, step_tokens=6, steps_ahead=True), model


def wanted_tokens(engine: PagedEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    """All tokens of a sequence, the stop token with them."""
    room = min(params.max_tokens, CONTEXT - len(prompt))
    tokens = expected_tokens(engine, prompt, params, n=room)
    for index, token in enumerate(tokens):
        if token in params.stop_token_ids and index + 1 > params.min_tokens:
            return tokens[: index + 1]
    return tokens


@dataclass
class Stream:
    """The test's model of one sequence."""

    prompt: list[int]
    params: SamplingParams
    wanted: list[int]
    emitted: list[int] = field(default_factory=list)
    started: bool = False
    ended: bool = False


class AheadMachine(PinningMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine, self.model = make_engine(n_pages=14, max_batch=3)
        self.streams: dict[str, Stream] = {}
        self.pins: list[tuple[int, ...]] = []
        self.n_sequences = 0

    @rule(
        prompt=st.sampled_from(PROMPTS),
        seed=st.integers(0, 3),
        stops=st.sampled_from([(), (3,), (1, 5, 7)]),
        max_tokens=st.sampled_from([1, 2, 5, 12]),
        penalty=st.sampled_from([0.0, 0.0, 0.5]),
        fill=st.booleans(),
        reuse=st.booleans(),
    )
    def reserve(
        self,
        prompt: list[int],
        seed: int,
        stops: tuple[int, ...],
        max_tokens: int,
        penalty: float,
        fill: bool,
        reuse: bool,
    ) -> None:
        """A penalty changes no token of the fake model, but needs the host. An id may be used again."""
        params = SamplingParams(
            seed=seed, stop_token_ids=stops, max_tokens=max_tokens, presence_penalty=penalty
        )
        seq_id = "again" if reuse and "again" not in self.streams else f"s{self.n_sequences}"
        self.n_sequences += 1
        spec = SequenceSpec(seq_id, np.array(prompt, dtype=np.uint32), params)
        try:
            reservation = self.engine.reserve(spec)
        except OutOfPages:
            return
        self.streams[seq_id] = Stream(prompt, params, wanted_tokens(self.engine, prompt, params))
        if fill:
            size = self.engine.info.page_bytes
            for block in range(reservation.cached_tokens // BLOCK, -(-len(prompt) // BLOCK)):
                content = self.model.page_content(np.array(prompt, dtype=np.uint32), block)
                at = reservation.pages[block] * size
                self.model.memory[at : at + len(content)] = content
            self.engine.fill(seq_id, len(prompt))

    @rule(index=st.integers(0, 20), with_token=st.booleans())
    def start(self, index: int, with_token: bool) -> None:
        waiting = [s for s in self.engine.sequences() if not self.streams[s.spec.seq_id].started]
        if not waiting:
            return
        sequence = waiting[index % len(waiting)]
        stream = self.streams[sequence.spec.seq_id]
        stream.started = True
        if with_token and sequence.n_computed == sequence.n_tokens:
            stream.emitted.append(stream.wanted[0])
            self.engine.start(sequence.spec.seq_id, first_token=stream.wanted[0])
        else:
            self.engine.start(sequence.spec.seq_id)

    @precondition(lambda self: self.engine.has_work())
    @rule(n_steps=st.integers(1, 4))
    def steps(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self.take(self.engine.step())

    @precondition(lambda self: self.engine.has_work())
    @rule(kind=st.sampled_from(["right", "wrong"]))
    def step_with_drafts(self, kind: str) -> None:
        drafts = {}
        for seq_id, stream in self.streams.items():
            right = stream.wanted[len(stream.emitted) :][:3]
            drafts[seq_id] = right if kind == "right" else [*right[:1], 11, 3]
        self.take(self.engine.step(drafts))

    def take(self, outputs: list[StepOutput]) -> None:
        assert len({o.seq_id for o in outputs}) == len(outputs)
        for output in outputs:
            stream = self.streams[output.seq_id]
            assert not stream.ended
            stream.emitted += output.tokens
            assert stream.emitted == stream.wanted[: len(stream.emitted)]
            stream.ended = output.finish is not None or output.failure is not None
            if output.failure is None:
                assert (output.finish is not None) == (stream.emitted == stream.wanted)
            else:
                assert isinstance(output.failure, OutOfPages)

    @rule(index=st.integers(0, 20), is_cancelled=st.booleans())
    def release(self, index: int, is_cancelled: bool) -> None:
        if self.streams:
            seq_id = sorted(self.streams)[index % len(self.streams)]
            if is_cancelled:
                self.engine.abandon(seq_id)
            del self.streams[seq_id]
            self.engine.release(seq_id)

    @precondition(lambda self: self.engine.has_work())
    @rule(left=st.sets(st.integers(0, 20), max_size=3))
    def release_during_a_step(self, left: set[int]) -> None:
        """Another thread releases sequences while the host waits: at once, or after the step."""
        leaving = {sorted(self.streams)[index % len(self.streams)] for index in left if self.streams}
        stayed: set[str] = set()

        def leave() -> None:
            for seq_id in leaving & set(self.streams):
                self.engine.abandon(seq_id)
                if self.engine.try_release(seq_id):
                    del self.streams[seq_id]
                else:
                    stayed.add(seq_id)

        self.model.during_wait = leave
        outputs = self.engine.step()
        self.model.during_wait = lambda: None
        self.take([output for output in outputs if output.seq_id in self.streams])
        for seq_id in stayed & set(self.streams):
            del self.streams[seq_id]
            self.engine.release(seq_id)

    @precondition(lambda self: self.engine.has_work())
    @rule(where=st.sampled_from(["launch", "half", "result"]))
    def failing_step(self, where: str) -> None:
        """A failed device changes no sequence: the same rows run again."""
        before = {s.spec.seq_id: s.n_tokens for s in self.engine.sequences()}
        self.model.fails = where
        try:
            self.take(self.engine.step())
        except RuntimeError:
            assert {s.spec.seq_id: s.n_tokens for s in self.engine.sequences()} == before
        self.model.fails = ""

    @invariant()
    def accounting_is_consistent(self) -> None:
        check_accounting(self.engine)
        assert self.engine.ledger().sequences == len(self.streams)

    def teardown(self) -> None:
        for seq_id in list(self.streams):
            self.engine.release(seq_id)
        for pages in self.pins:
            self.engine.unpin(pages)
        ledger = self.engine.ledger()
        assert ledger.pages_held == ledger.launched_pages, "no page is without an owner"
        while self.engine.has_work():
            assert not self.engine.step()
        ledger = self.engine.ledger()
        assert (ledger.sequences, ledger.pages_held, ledger.pinned_pages) == (0, 0, 0)
        check_accounting(self.engine)


TestAheadMachine = AheadMachine.TestCase
TestAheadMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@pytest.mark.soak
class TestAheadMachineForLong(AheadMachine.TestCase):  # type: ignore[valid-type, misc]
    settings = settings(max_examples=3_000, stateful_step_count=50, deadline=None)


def start_streams(engine: PagedEngine, params: list[SamplingParams]) -> dict[str, list[int]]:
    """Sequences 0, 1, ... with the prompt [1, 2, index]; returns their wanted tokens."""
    for index, each in enumerate(params):
        engine.reserve(SequenceSpec(str(index), np.array([1, 2, index], np.uint32), each))
        engine.start(str(index))
    return {str(index): wanted_tokens(engine, [1, 2, index], each) for index, each in enumerate(params)}


def finish(engine: PagedEngine) -> dict[str, list[int]]:
    emitted: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            emitted.setdefault(output.seq_id, []).extend(output.tokens)
    return emitted


@pytest.mark.parametrize("stops", [(), (3,)])
def test_steps_follow_steps_that_are_not_read(stops: tuple[int, ...]) -> None:
    """The premise of the machine: most rows take tokens that the host does not know."""
    engine, model = make_engine(n_pages=64, max_batch=8)
    wanted = start_streams(
        engine, [SamplingParams(seed=seed, max_tokens=12, stop_token_ids=stops) for seed in range(5)]
    )
    assert finish(engine) == wanted
    n_tokens = sum(map(len, wanted.values()))
    assert model.n_launched >= 10
    assert model.n_followed >= 2 * n_tokens // 3
    # The ends by a limit are known before. A stop token is found when one row more is on its way.
    n_late = model.n_rows - n_tokens
    assert bool(n_late) == bool(stops)
    assert n_late <= sum(tokens[-1] in stops for tokens in wanted.values())


def test_a_late_row_keeps_its_page_until_it_has_run() -> None:
    """Between launch and result its sequence is released, and a peer writes to the next pages."""
    engine, model = make_engine(n_pages=4, max_batch=2)
    start_streams(engine, [SamplingParams(seed=1, max_tokens=12)])
    while model.n_followed < 3:
        engine.step()
    engine.release("0")
    ledger = engine.ledger()
    assert ledger.pages_held == ledger.launched_pages == 1  # of the row in flight
    prompt = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    params = SamplingParams(seed=2, max_tokens=5)
    reservation = engine.reserve(SequenceSpec("b", np.array(prompt, np.uint32), params))
    size = engine.info.page_bytes
    for block, page in enumerate(reservation.pages):
        content = model.page_content(np.array(prompt, dtype=np.uint32), block)
        model.memory[page * size : page * size + len(content)] = content
    engine.fill("b", len(prompt))
    engine.start("b", first_token=wanted_tokens(engine, prompt, params)[0])
    assert finish(engine) == {"b": wanted_tokens(engine, prompt, params)[1:]}
    engine.release("b")
    assert engine.ledger().pages_held == 0


def test_pages_that_a_sequence_lacks_are_kept_from_new_ones_while_a_step_is_in_flight() -> None:
    """The last page goes to one sequence, and a step is in flight when the other one lacks one."""
    engine, _ = make_engine(n_pages=3, max_batch=2)
    start_streams(engine, [SamplingParams(seed=seed, max_tokens=12) for seed in range(2)])
    n_outputs = 0
    while engine.ledger().pages_awaited == 0:
        n_outputs = len(engine.step())
    assert n_outputs == 2, "known as soon as the launched step ends, not one step later"
    engine.release("0")
    ledger = engine.ledger()
    assert (ledger.pages_free + ledger.pages_cached, ledger.pages_awaited) == (2, 1)
    with pytest.raises(OutOfPages):
        engine.reserve(SequenceSpec("new", np.array([1, 2, 3, 4], np.uint32), SamplingParams()))


def test_a_step_that_waits_for_a_prompt_takes_no_page() -> None:
    engine, _ = make_engine(n_pages=8, max_batch=2)
    start_streams(engine, [SamplingParams(seed=1, max_tokens=12)])
    while engine.sequences()[0].n_tokens < 2 * BLOCK:  # the next row's token is unknown, and its page is new
        engine.step()
    assert engine._ahead is not None and engine._ahead.has_step
    n_pages = engine.ledger().pages_held
    engine.reserve(SequenceSpec("prompt", np.array([7, 8, 9], np.uint32), SamplingParams(max_tokens=2)))
    engine.start("prompt")
    before = engine.ledger().pages_held
    engine.step()
    assert (n_pages, before, engine.ledger().pages_held) == (2, 3, 3)


def test_what_needs_the_host_ends_the_run_of_launched_steps() -> None:
    """A penalty and log probabilities: such a step runs when no other is in flight."""
    engine, model = make_engine(n_pages=64, max_batch=8)
    plain = SamplingParams(seed=1, max_tokens=8)
    wanted = start_streams(engine, [plain, SamplingParams(seed=2, max_tokens=4, presence_penalty=0.5), plain])
    assert finish(engine) == wanted
    assert model.n_followed >= 4  # of the others, after its end


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_features_begin_and_end_between_launched_steps(period: int) -> None:
    """The draft gate changes its mind: what a head gets follows on, and a step in flight has none."""
    engine, model = make_engine(n_pages=64, max_batch=8, feature_width=4)
    wanted = start_streams(engine, [SamplingParams(seed=seed, max_tokens=16) for seed in range(3)])
    emitted: dict[str, list[int]] = {seq_id: [] for seq_id in wanted}
    n_with = n_steps = 0
    while engine.has_work():
        n_steps += 1
        for output in engine.step(features=n_steps // period % 2 == 0):
            emitted[output.seq_id] += output.tokens
            if output.features is None:
                continue
            n_with += 1
            end = output.feature_start + len(output.features)
            assert end == output.computed_tokens
            assert output.feature_tokens is not None
            tokens = [1, 2, int(output.seq_id), *emitted[output.seq_id]]
            assert output.feature_tokens.tolist() == tokens[output.feature_start + 1 : end + 1]
    assert emitted == wanted
    assert n_with >= 3 and (model.n_followed > 3 or period == 1)


def test_a_model_that_cannot_launch_is_refused() -> None:
    engine = build_fake_engine()
    with pytest.raises(FailedPrecondition, match="FakeModel cannot begin a step"):
        PagedEngine(engine.model, steps_ahead=True)

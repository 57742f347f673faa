"""The engine under random orders of calls: reserve, fill, start, step, drafts, pin, release.

A step may be aborted at any of its pages; later results must not depend on it.

The fake model refuses pages with any wrong byte. A page that is reused too early, written while
shared, or found under a wrong hash raises DataCorrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from libs.engine.core.engine import PagedEngine
from libs.engine.core.fake import FakeModel, build_fake_engine, expected_tokens
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.step_model import SequenceRows, StepResult
from libs.engine.step.stop_flag import StopFlag
from libs.engine.step.types import SamplingParams, SequenceSpec
from slipstream.errors import OutOfPages
from tests.engine.core.pinning_machine import PinningMachine
from tests.engine.support import check_accounting

BLOCK = 4
MAX_TOKENS = 10
# Prompts that share prefixes of full and of partial blocks.
PROMPTS = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    [1, 2, 3, 4, 5, 6, 7, 8],
    [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15],
    [1, 2, 3, 9],
    [1],
]


@dataclass
class Run:
    """The test's model of one sequence."""

    prompt: list[int]
    params: SamplingParams
    emitted: list[int] = field(default_factory=list)
    started: bool = False
    ended: bool = False
    failed: bool = False


class AbortableModel(FakeModel):
    """A fake model whose steps abort if `cut` is set, and leave garbage as the KV of their rows."""

    def __init__(self, model: FakeModel) -> None:
        self.__dict__.update(model.__dict__)
        self.cut = False
        self.during_compute: Callable[[], None] = lambda: None  # calls of another thread during a step

    def run(self, batch: ForwardBatch, rows: Sequence[SequenceRows], stop: StopFlag) -> StepResult:
        if self.cut:
            for r in rows:
                for at in range(len(r.tokens) - r.n_rows, len(r.tokens)):
                    start = (r.pages[at // BLOCK] * BLOCK + at % BLOCK) * self._row_bytes
                    self.memory[start : start + self._row_bytes] = b"?" * self._row_bytes
            stop.set()
        self.during_compute()
        return super().run(batch, rows, stop)


class EngineMachine(PinningMachine):
    def __init__(self) -> None:
        super().__init__()
        fake = build_fake_engine(
            n_pages=14, block_tokens=BLOCK, vocab_size=50, max_context_tokens=24, max_batch=3
        ).model
        assert isinstance(fake, FakeModel)
        self.model = AbortableModel(fake)
        self.engine = PagedEngine(self.model, step_tokens=6)
        self.runs: dict[str, Run] = {}
        self.pins: list[tuple[int, ...]] = []
        self.n_sequences = 0
        self.abandoned: set[str] = set()  # not released yet

    def expected(self, run: Run) -> list[int]:
        room = 24 - len(run.prompt)
        return expected_tokens(self.engine, run.prompt, run.params, n=min(MAX_TOKENS, room))

    @rule(
        prompt=st.sampled_from(PROMPTS),
        seed=st.integers(0, 2),
        n_emitted=st.integers(0, 3),
        fill=st.booleans(),
    )
    def reserve(self, prompt: list[int], seed: int, n_emitted: int, fill: bool) -> None:
        params = SamplingParams(seed=seed, max_tokens=MAX_TOKENS)
        run = Run(prompt, params)
        run.emitted = self.expected(run)[:n_emitted]
        seq_id = f"s{self.n_sequences}"
        self.n_sequences += 1
        spec = SequenceSpec(seq_id, np.array(prompt, dtype=np.uint32), params, emitted=tuple(run.emitted))
        before = self.engine.ledger()
        try:
            reservation = self.engine.reserve(spec)
        except OutOfPages:
            assert self.engine.ledger() == before
            return
        assert reservation.cached_tokens % BLOCK == 0
        assert reservation.cached_tokens < spec.context_tokens
        self.runs[seq_id] = run
        if fill:
            self.write_pages(reservation.pages, reservation.cached_tokens, [*prompt, *run.emitted])
            self.engine.fill(seq_id, spec.context_tokens)

    def write_pages(self, pages: tuple[int, ...], cached_tokens: int, context: list[int]) -> None:
        """Write the KV bytes that a transport would deliver."""
        model, size = self.engine.model, self.engine.info.page_bytes
        assert isinstance(model, FakeModel)
        for block in range(cached_tokens // BLOCK, -(-len(context) // BLOCK)):
            content = model.page_content(np.array(context, dtype=np.uint32), block)
            at = pages[block] * size
            self.engine.memory[at : at + len(content)] = content

    @rule(index=st.integers(0, 20))
    def start(self, index: int) -> None:
        waiting = [s for s, run in self.runs.items() if not run.started]
        if waiting:
            seq_id = waiting[index % len(waiting)]
            self.runs[seq_id].started = True
            self.engine.start(seq_id)

    @precondition(lambda self: self.engine.has_work())
    @rule(kind=st.sampled_from(["none", "right", "wrong", "stale"]))
    def step(self, kind: str) -> None:
        drafts: dict[str, list[int]] = {"unknown": [1]}
        for seq_id, run in self.runs.items():
            done = len(run.emitted)
            right = self.expected(run)[done : done + 3]
            drafts[seq_id] = {
                "none": [],
                "right": right,
                "wrong": [*right[:1], 999, 3],
                "stale": self.expected(run)[max(done - 1, 0) : done + 2],
            }[kind]
        outputs = self.engine.step(drafts)
        waits_for_release = any(run.failed for run in self.runs.values())
        # With abandoned sequences in it, a step may abort before it begins.
        assert outputs or waits_for_release or self.abandoned, "there was work, and nothing happened"
        assert len({o.seq_id for o in outputs}) == len(outputs)
        for output in outputs:
            run = self.runs[output.seq_id]
            run.emitted += output.tokens
            assert run.emitted == self.expected(run)[: len(run.emitted)]
            assert not run.ended
            if output.failure is not None:
                run.ended = run.failed = True
                continue
            assert (output.finish is not None) == (len(run.emitted) == len(self.expected(run)))
            run.ended = output.finish is not None

    @precondition(lambda self: self.engine.has_work())
    @rule(drafting=st.booleans())
    def aborted_step(self, drafting: bool) -> None:
        """An aborted step has only results that need no computing: copied blocks, ends by a first token."""
        before = {s.spec.seq_id: (s.n_tokens, s.state) for s in self.engine.sequences()}
        drafts = {i: self.expected(run)[len(run.emitted) :][:3] for i, run in self.runs.items() if drafting}
        self.model.cut = True
        outputs = self.engine.step(drafts)
        self.model.cut = False
        for output in outputs:
            run = self.runs[output.seq_id]
            assert not output.tokens
            assert output.shared_tokens or output.failure or output.finish
            if output.failure is not None:
                run.ended = run.failed = True
            elif output.finish is not None:
                run.ended = True
        ended = {o.seq_id for o in outputs if o.finish or o.failure}
        assert {
            s.spec.seq_id: (s.n_tokens, s.state)
            for s in self.engine.sequences()
            if s.spec.seq_id not in ended
        } == {i: state for i, state in before.items() if i not in ended}

    @rule(index=st.integers(0, 20))
    def abandon(self, index: int) -> None:
        """Cancel a sequence before its release; other sequences are not affected."""
        if self.runs:
            seq_id = sorted(self.runs)[index % len(self.runs)]
            self.abandoned.add(seq_id)
            self.engine.abandon(seq_id)

    @rule(index=st.integers(0, 20))
    def release(self, index: int) -> None:
        if self.runs:
            seq_id = sorted(self.runs)[index % len(self.runs)]
            del self.runs[seq_id]
            self.abandoned.discard(seq_id)
            self.engine.release(seq_id)
            self.engine.release(seq_id)

    @precondition(lambda self: self.engine.has_work())
    @rule(left=st.sets(st.integers(0, 20), max_size=3))
    def release_during_a_step(self, left: set[int]) -> None:
        """Sequences without a row in the step are released during it, the others after it."""
        before = set(self.runs)
        leaving = {sorted(before)[index % len(before)] for index in left if before}
        stayed: set[str] = set()

        def leave() -> None:
            for seq_id in leaving:
                if self.engine.try_release(seq_id):
                    del self.runs[seq_id]
                    self.abandoned.discard(seq_id)
                else:
                    stayed.add(seq_id)

        self.model.during_compute = leave
        outputs = self.engine.step()
        self.model.during_compute = lambda: None
        for output in outputs:
            run = self.runs.get(output.seq_id)
            if run is None:  # ended before its release
                assert output.seq_id in leaving - stayed
                continue
            run.emitted += output.tokens
            assert run.emitted == self.expected(run)[: len(run.emitted)]
            run.failed = run.failed or output.failure is not None
            run.ended = run.ended or run.failed or output.finish is not None
        assert {s.spec.seq_id for s in self.engine.sequences()} == set(self.runs)

    @invariant()
    def accounting_is_consistent(self) -> None:
        check_accounting(self.engine)
        assert self.engine.ledger().sequences == len(self.runs)

    def teardown(self) -> None:
        for seq_id in list(self.runs):
            self.engine.release(seq_id)
        for pages in self.pins:
            self.engine.unpin(pages)
        ledger = self.engine.ledger()
        assert (ledger.sequences, ledger.pages_held, ledger.pinned_pages) == (0, 0, 0)
        check_accounting(self.engine)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)

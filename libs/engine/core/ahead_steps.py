"""Steps that run one ahead of the host: a step begins before the tokens of the step before it are read.

The host then works while the device computes. It finds the end of a sequence one step late. The row that ran
meanwhile is dropped with its token, and its KV lies behind the sequence's end. Until that row has run, its
page stays held, so that no other sequence and no peer writes there first.

Only decode rows whose tokens the device chooses alone go ahead. A prompt, a draft, a grammar, a penalty, log
probabilities or wanted features end the run of such steps, and later ones begin it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from libs.engine.core.state_lock import StateLock
from libs.engine.core.step_commit import commit_outputs
from libs.engine.core.step_outputs import split_result
from libs.engine.kv.block_features import BlockFeatures
from libs.engine.kv.block_manager import BlockManager
from libs.engine.kv.sequence import EngineSequence, SequenceState
from libs.engine.scheduling.scheduler import Limits, Slice, StepCandidate, schedule
from libs.engine.scheduling.step_abort import StepAbort
from libs.engine.step.batch import Int32Array
from libs.engine.step.step_model import AheadModel, PendingStep, SequenceRows, StepResult, lay_out
from libs.engine.step.types import EngineInfo, StepOutput


@dataclass(frozen=True, slots=True)
class AheadRows:
    """What a step ahead computes: a row of each sequence, and where its token comes from."""

    sequences: tuple[EngineSequence, ...]
    rows: tuple[SequenceRows, ...]
    slices: tuple[Slice, ...]
    sources: Int32Array

    def grow(self, blocks: BlockManager) -> int:
        """Allocate the rows' pages; returns how many sequences lack one. `pages` of a row grow with them."""
        pairs = zip(self.sequences, self.rows, strict=True)
        return sum(not sequence.grow(len(row.tokens), blocks) for sequence, row in pairs)

    def written_pages(self, block_tokens: int) -> list[int]:
        """The page that each row writes to."""
        return [r.pages[(len(r.tokens) - 1) // block_tokens] for r in self.rows]


@dataclass(frozen=True, slots=True)
class AheadStep:
    """A launched step. `pages` are held until its result is there."""

    planned: AheadRows
    pending: PendingStep
    pages: Sequence[int]


def plan_ahead(
    sequences: Collection[EngineSequence],
    before: AheadStep | None,
    drafts: Mapping[str, Sequence[int]],
    *,
    info: EngineInfo,
    limits: Limits,
) -> AheadRows | None:
    """The rows behind those of `before`, whose tokens are unknown. Changes nothing, and allocates no page.

    None where a prompt or a draft needs a step that the host prepares, and where nothing decodes.
    """
    if any(s.state is SequenceState.PREFILLING for s in sequences):
        return None
    places = {} if before is None else {s: i for i, s in enumerate(before.planned.sequences)}
    decoding: dict[str, EngineSequence] = {}
    for sequence in sequences:
        if sequence.state is not SequenceState.DECODING:
            continue
        if sequence in places and sequence.ends_within(1, max_context_tokens=info.max_context_tokens):
            continue
        if drafts.get(sequence.spec.seq_id):
            return None
        decoding[sequence.spec.seq_id] = sequence
    slices = schedule([_candidate(sequence) for sequence in decoding.values()], limits)
    if not slices:
        return None
    chosen = tuple(decoding[piece.seq_id] for piece in slices)
    return AheadRows(
        chosen,
        tuple(sequence.next_row(int(sequence in places)) for sequence in chosen),
        tuple(slices),
        np.array([places.get(sequence, -1) for sequence in chosen], np.int32),
    )


class AheadLoop:
    """Keeps one step in flight. The engine's thread calls it, under the engine's lock."""

    def __init__(
        self,
        model: AheadModel,
        blocks: BlockManager,
        features: BlockFeatures,
        *,
        limits: Limits,
        slice_numbers: Iterator[int],
        step_abort: StepAbort,
        state_lock: StateLock,
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._features = features
        self._limits = limits
        self._slice_numbers = slice_numbers
        self._step_abort = step_abort
        self._state_lock = state_lock
        self._in_flight: AheadStep | None = None
        self._held: list[Sequence[int]] = []  # the pages of launched steps
        # Sequences that lacked a page when a step was planned last, which new sequences may not take.
        self.n_starved = 0

    @property
    def has_step(self) -> bool:
        """Whether a step is in flight, whose result must still be taken."""
        return self._in_flight is not None

    def count_pages(self) -> int:
        """Pages that launched steps alone hold: their sequences are released."""
        held = Counter(page for pages in self._held for page in pages)
        return sum(self._blocks.references(page) == n for page, n in held.items())

    def step(
        self,
        sequences: Mapping[str, EngineSequence],
        drafts: Mapping[str, Sequence[int]],
        *,
        may_launch: bool,
    ) -> list[StepOutput] | None:
        """Launch the next step, then take the result of the one before it.

        None when no step is in flight, and the next one needs the host. An error changes no sequence.
        """
        oldest = self._in_flight or (self._launch_next(sequences, drafts, None) if may_launch else None)
        if oldest is None:
            return None
        self._in_flight = None
        try:
            self._in_flight = self._launch_next(sequences, drafts, oldest) if may_launch else None
            result = self._wait(oldest)
        except BaseException:
            newest, self._in_flight = self._in_flight, None
            self._drop(oldest, newest)
            raise
        self._release(oldest.pages)
        return self._commit(oldest.planned, result, sequences)

    def _launch_next(
        self,
        sequences: Mapping[str, EngineSequence],
        drafts: Mapping[str, Sequence[int]],
        before: AheadStep | None,
    ) -> AheadStep | None:
        info, self.n_starved = self._model.info, 0
        planned = plan_ahead(sequences.values(), before, drafts, info=info, limits=self._limits)
        if planned is None or not self._model.can_launch(planned.rows):
            return None
        self.n_starved = planned.grow(self._blocks)
        if self.n_starved:
            return None
        batch = lay_out(planned.rows, block_tokens=info.block_tokens, want_features=False)
        pages = planned.written_pages(info.block_tokens)
        self._acquire(pages)
        try:
            with self._running(planned, before):
                pending = self._model.launch(batch, planned.rows, planned.sources)
        except BaseException:
            self._release(pages)
            raise
        for sequence in planned.sequences:
            sequence.last_slice = next(self._slice_numbers)
        return AheadStep(planned, pending, pages)

    def _wait(self, step: AheadStep) -> StepResult:
        with self._running(step.planned, self._in_flight):
            return step.pending.result()

    @contextmanager
    def _running(self, planned: AheadRows, other: AheadStep | None) -> Iterator[None]:
        """Release the engine's lock. Sequences with rows in a step in flight keep their places meanwhile."""
        rows = [*planned.rows, *(other.planned.rows if other else ())]
        self._step_abort.begin({row.seq_id: 1 for row in rows})
        try:
            with self._state_lock.released():
                yield
        finally:
            self._step_abort.end(aborted=False)

    def _commit(
        self, planned: AheadRows, result: StepResult, sequences: Mapping[str, EngineSequence]
    ) -> list[StepOutput]:
        parts = split_result(result, planned.rows, planned.slices, {})
        return [
            commit_outputs(
                sequence,
                part,
                self._blocks,
                self._features,
                max_context_tokens=self._model.info.max_context_tokens,
            )
            for sequence, part in zip(planned.sequences, parts, strict=True)
            # The others ended, or were released, after the launch.
            if sequences.get(part.rows.seq_id) is sequence and sequence.state is SequenceState.DECODING
        ]

    def _drop(self, *steps: AheadStep | None) -> None:
        """Release the pages of steps whose results are not wanted, after the device has written to them."""
        for step in steps:
            if step is not None:
                with suppress(Exception), self._running(step.planned, None):
                    step.pending.result()
                self._release(step.pages)

    def _acquire(self, pages: Sequence[int]) -> None:
        self._blocks.acquire(pages)
        self._held.append(pages)

    def _release(self, pages: Sequence[int]) -> None:
        self._held.remove(pages)
        self._blocks.release(pages)


def _candidate(sequence: EngineSequence) -> StepCandidate:
    return StepCandidate(
        seq_id=sequence.spec.seq_id,
        arrival=sequence.arrival,
        last_slice=sequence.last_slice,
        pending_tokens=1,
        decoding=True,
    )

"""The engine: continuous batching over paged KV. Knows tokens, blocks and pages; no network, no text.

`step` is the whole loop: admit, schedule, run, commit. What computes is behind `StepModel`, so this
file imports no torch and the fake engine of tests runs the same bookkeeping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from libs.common.errors import FailedPrecondition, InvalidArgument, NotFound, OutOfPages
from libs.engine.core.accounting import ledger_of
from libs.engine.core.state_lock import StateLock, keeps_books
from libs.engine.core.step_commit import fail, progress, take_sampled
from libs.engine.core.step_outputs import split_result
from libs.engine.kv.block_manager import BlockManager
from libs.engine.kv.page_pins import PagePins
from libs.engine.kv.sequence import EngineSequence, SequenceState
from libs.engine.scheduling.admission import check_spec
from libs.engine.scheduling.candidates import find_candidates
from libs.engine.scheduling.prefill_wait import count_waits
from libs.engine.scheduling.scheduler import Limits, Slice, schedule
from libs.engine.scheduling.shared_blocks import SharedBlocks
from libs.engine.scheduling.step_abort import StepAbort
from libs.engine.step.step_model import SequenceRows, StepModel, StepResult, lay_out
from libs.engine.step.stop_flag import StepAborted
from libs.engine.step.types import (
    FEATURE_WINDOW_TOKENS,
    DeviceBytes,
    EngineInfo,
    EngineLedger,
    FloatArray,
    FullBlock,
    PageChange,
    PageReservation,
    SequenceSpec,
    StepOutput,
)

NO_DRAFTS: Mapping[str, Sequence[int]] = {}


class PagedEngine:
    """Implements `libs.engine.step.types.Engine` over a StepModel; contracts are stated there."""

    def __init__(
        self, model: StepModel, *, step_tokens: int = 512, share_running_prefixes: bool = True
    ) -> None:
        """`share_running_prefixes`: False is the simple way, in which siblings compute everything twice."""
        self.model = model
        self._limits = Limits(max(step_tokens, model.info.max_batch), model.info.max_batch)
        self._blocks = BlockManager(model.info.n_pages)
        self._shared = SharedBlocks(self._blocks, model.memory, model.info, enabled=share_running_prefixes)
        self._sequences: dict[str, EngineSequence] = {}
        self._pins = PagePins(self._blocks)
        self._step_cut = StepAbort()
        self.books = StateLock()
        self._n_started = 0
        self._n_turns = 0
        self._n_starved = 0  # decoding sequences that wait for a page; new ones may not take it

    @property
    def info(self) -> EngineInfo:
        return self.model.info

    @property
    def memory(self) -> memoryview | DeviceBytes:
        return self.model.memory

    @property
    def memory_address(self) -> int:
        return self.model.memory_address

    # ---- life of a sequence

    @keeps_books
    def reserve(self, spec: SequenceSpec) -> PageReservation:
        if spec.seq_id in self._sequences:
            raise FailedPrecondition(f"sequence {spec.seq_id} is in use")
        check_spec(spec, self.info)
        block_tokens = self.info.block_tokens
        n_pages = -(-(spec.context_tokens + 1) // block_tokens)
        if n_pages > self.info.n_pages:
            raise InvalidArgument("prompt", f"needs {n_pages} KV pages, this worker has {self.info.n_pages}")
        n_full = spec.context_tokens // block_tokens
        sequence = EngineSequence(spec, spec.block_hashes[:n_full], block_tokens)
        # The last token is always computed (or handed over): its block is never taken from the cache.
        n_reusable = (spec.context_tokens - 1) // block_tokens
        hit = self._blocks.match(sequence.full_block_hashes(n_reusable))
        sequence.pages = self._blocks.reserve(hit, n_pages - len(hit), leave=self._awaited())
        sequence.n_computed = len(hit) * block_tokens
        sequence.n_committed_blocks = len(hit)
        self._sequences[spec.seq_id] = sequence
        return PageReservation(spec.seq_id, tuple(sequence.pages), sequence.n_computed)

    @keeps_books
    def fill(self, seq_id: str, n_tokens: int) -> None:
        sequence = self._reserved(seq_id)
        if not sequence.n_computed <= n_tokens <= sequence.n_tokens:
            raise FailedPrecondition(
                f"{seq_id}: filled to {n_tokens}, outside [{sequence.n_computed}, {sequence.n_tokens}]"
            )
        sequence.n_computed = n_tokens
        # Not the block of the last token: it may still be computed here, into this page.
        sequence.commit_blocks(min(n_tokens, sequence.n_tokens - 1), self._blocks)

    @keeps_books
    def exchange(self, seq_id: str, pages: Sequence[int]) -> PageReservation:
        return self._reserved(seq_id).exchange(pages, self._blocks, leave=self._awaited())

    @keeps_books
    def start(
        self, seq_id: str, *, first_token: int | None = None, features: FloatArray | None = None
    ) -> None:
        sequence = self._reserved(seq_id)
        context = sequence.n_tokens
        if first_token is None:
            sequence.n_computed = min(sequence.n_computed, context - 1)
            sequence.state = SequenceState.PREFILLING
        else:
            if sequence.n_computed < context:
                raise FailedPrecondition(f"{seq_id}: KV of {sequence.n_computed} of {context} tokens only")
            sequence.commit_blocks(context, self._blocks)
            _, sequence.finish = sequence.cut((first_token,), max_context_tokens=self.info.max_context_tokens)
            sequence.append((first_token,))
            sequence.state = SequenceState.DECODING
        if features is not None:
            sequence.features.append(context - len(features), features)
        self._n_started += 1
        sequence.arrival = self._n_started

    @keeps_books
    def release(self, seq_id: str) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._blocks.release(sequence.pages)
        self._step_cut.forget(seq_id)

    def abandon(self, seq_id: str) -> None:
        self._step_cut.abandon(seq_id)

    @keeps_books
    def let_go(self, seq_id: str) -> bool:
        if self._step_cut.runs(seq_id):
            return False
        self.release(seq_id)
        return True

    @keeps_books
    def pin(self, pages: Sequence[int]) -> None:
        self._pins.pin(pages)

    @keeps_books
    def pin_blocks(self, blocks: Sequence[FullBlock]) -> tuple[FullBlock, ...]:
        return self._pins.pin_blocks(blocks)

    @keeps_books
    def take_block_changes(self) -> list[PageChange]:
        return self._blocks.take_changes()

    @keeps_books
    def unpin(self, pages: Sequence[int], *, spent: bool = False) -> None:
        self._pins.unpin(pages, spent=spent)

    @keeps_books
    def sequences(self) -> list[EngineSequence]:
        """Those not released, to look at."""
        return list(self._sequences.values())

    # ---- the loop

    @keeps_books
    def step(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> list[StepOutput]:
        outputs = self._tell_finished()
        prefilling = [s for s in self._sequences.values() if s.state is SequenceState.PREFILLING]
        taken = self._shared.take_over(prefilling)
        candidates, starved = find_candidates(
            self._sequences.values(),
            drafts,
            self._shared.followers(prefilling),
            blocks=self._blocks,
            info=self.info,
        )
        self._n_starved = len(starved)
        slices = schedule(candidates, self._limits)
        computed = {piece.seq_id for piece in slices}
        outputs += [self._progress(i, n_tokens) for i, n_tokens in taken.items() if i not in computed]
        if not slices:
            return outputs + self._fail_one(starved)
        rows = [self._rows(s, drafts) for s in slices]
        result = self._compute(rows)
        if result is None:  # cut short: what was taken over stands, the rows run again
            return outputs + [self._progress(i, n_tokens) for i, n_tokens in taken.items() if i in computed]
        count_waits(prefilling, rows)
        for part in rows:
            self._n_turns += 1
            self._sequences[part.seq_id].last_turn = self._n_turns
        return outputs + [
            take_sampled(
                self._sequences[part.rows.seq_id],
                part,
                self._blocks,
                max_context_tokens=self.info.max_context_tokens,
            )
            for part in split_result(result, rows, slices, taken)
        ]

    @keeps_books
    def has_work(self) -> bool:
        return any(
            s.state in (SequenceState.PREFILLING, SequenceState.DECODING) for s in self._sequences.values()
        )

    @keeps_books
    def ledger(self) -> EngineLedger:
        return ledger_of(
            self._blocks,
            self._sequences.values(),
            pinned_pages=len(self._pins),
            pages_awaited=self._awaited(),
            steps_cut=self._step_cut.cuts,
        )

    @keeps_books
    def check(self) -> None:
        """Raises Internal when the books do not balance. Cheap enough for idle moments and tests."""
        self._blocks.check()

    # ---- parts of a step

    def _awaited(self) -> int:
        """Pages to be left to sequences that starve. Without work there is no next step to count anew:
        whoever starved is gone."""
        return self._n_starved if self.has_work() else 0

    def _tell_finished(self) -> list[StepOutput]:
        """Sequences that ended with the very token they were started with."""
        outputs = []
        for seq_id, sequence in self._sequences.items():
            if sequence.state is SequenceState.DECODING and sequence.finish is not None:
                sequence.state = SequenceState.FINISHED
                outputs.append(StepOutput(seq_id, (), sequence.n_computed, finish=sequence.finish))
        return outputs

    def _fail_one(self, starved: list[EngineSequence]) -> list[StepOutput]:
        """Nothing can run for want of pages: the youngest ends, and its release lets the others go on."""
        if not starved or any(s.state is SequenceState.FAILED for s in self._sequences.values()):
            return []
        youngest = max(starved, key=lambda s: s.arrival)
        return [fail(youngest, OutOfPages(f"no KV page left after {youngest.n_tokens} tokens"))]

    def _rows(self, piece: Slice, drafts: Mapping[str, Sequence[int]]) -> SequenceRows:
        sequence = self._sequences[piece.seq_id]
        guesses = drafts[piece.seq_id][: piece.n_drafts] if piece.n_drafts else ()
        return sequence.rows(piece.n_tokens, guesses)

    def _compute(self, rows: Sequence[SequenceRows]) -> StepResult | None:
        """Run the rows; None when the step was cut short."""
        batch = lay_out(rows, block_tokens=self.info.block_tokens, want_features=self._want_features(rows))
        was_cut = False
        self._step_cut.begin({part.seq_id: part.n_rows for part in rows})
        try:
            with self.books.put_down():
                return self.model.run(batch, rows, self._step_cut.flag)
        except StepAborted:
            was_cut = True
            return None
        finally:
            self._step_cut.end(was_cut=was_cut)

    def _want_features(self, rows: Sequence[SequenceRows]) -> bool:
        if not self.info.feature_width:
            return False
        return any(
            r.n_sampled or len(r.tokens) > self._sequences[r.seq_id].n_tokens - FEATURE_WINDOW_TOKENS
            for r in rows
        )

    def _progress(self, seq_id: str, shared_tokens: int) -> StepOutput:
        return progress(self._sequences[seq_id], shared_tokens, self._blocks)

    def _reserved(self, seq_id: str) -> EngineSequence:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise NotFound(f"no sequence {seq_id}")
        if sequence.state is not SequenceState.RESERVED:
            raise FailedPrecondition(f"sequence {seq_id} is {sequence.state.value}")
        return sequence

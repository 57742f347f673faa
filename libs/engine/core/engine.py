"""The engine: continuous batching over paged KV. It has no network and no text.

`step` is the whole loop: admit, schedule, run, commit. A `StepModel` computes the rows, so this file imports
no torch, and the fake engine of tests runs the same bookkeeping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from libs.engine.core.accounting import count_ledger
from libs.engine.core.ahead_steps import AheadLoop
from libs.engine.core.state_lock import StateLock, locked
from libs.engine.core.step_commit import commit_outputs, fail, progress
from libs.engine.core.step_outputs import split_result
from libs.engine.kv.block_features import BlockFeatures, feature_bytes
from libs.engine.kv.block_manager import BlockManager
from libs.engine.kv.copied_pages import CopiedPages
from libs.engine.kv.page_copies import PageCopies
from libs.engine.kv.page_pins import PagePins
from libs.engine.kv.sequence import EngineSequence, SequenceState
from libs.engine.scheduling.admission import check_spec
from libs.engine.scheduling.candidates import find_candidates
from libs.engine.scheduling.prefill_shares import PrefillShares, charge_rows
from libs.engine.scheduling.prefill_wait import add_waited_tokens
from libs.engine.scheduling.scheduler import Limits, Slice, schedule
from libs.engine.scheduling.shared_blocks import SharedBlocks
from libs.engine.scheduling.step_abort import StepAbort
from libs.engine.step.constraint import TokenConstraint
from libs.engine.step.device_rows import FeatureArray
from libs.engine.step.page_parts import PageParts
from libs.engine.step.step_model import AheadModel, SequenceRows, StepModel, StepResult, lay_out
from libs.engine.step.stop_flag import StepAborted
from libs.engine.step.types import (
    FEATURE_WINDOW_TOKENS,
    DeviceBytes,
    EngineInfo,
    EngineLedger,
    FullBlock,
    PageChange,
    PageReservation,
    SequenceSpec,
    StepOutput,
)
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound, OutOfPages

NO_DRAFTS: Mapping[str, Sequence[int]] = {}


class PagedEngine:
    """Implements `libs.engine.step.types.Engine` over a StepModel; contracts are stated there."""

    def __init__(
        self,
        model: StepModel,
        *,
        step_tokens: int = 512,
        long_step_tokens: int = 0,
        share_running_prefixes: bool = True,
        steps_ahead: bool = False,
    ) -> None:
        """With `share_running_prefixes=False`, prompts with a common prefix each compute all of it.

        `steps_ahead`: a step of decode rows begins before the tokens of the last one are read. Raises
        FailedPrecondition where the model cannot do that.
        """
        self.model = model
        max_batch = model.info.max_batch
        self._limits = Limits(max(step_tokens, max_batch), max_batch, long_step_tokens)
        self._blocks = BlockManager(model.info.n_pages)
        self._features = BlockFeatures(feature_bytes(model.info.n_pages * model.info.page_bytes))
        self._copies = PageCopies(model.memory, model.info.page_bytes, model.page_parts)
        self.state_lock = StateLock()
        self._copied = CopiedPages(self._blocks, self.state_lock.released)
        self._shared = SharedBlocks(
            self._blocks, self._copies, self._copied, model.info, enabled=share_running_prefixes
        )
        self._sequences: dict[str, EngineSequence] = {}
        self._shares = PrefillShares()
        self._pins = PagePins(self._blocks)
        self._step_abort = StepAbort()
        self._n_started = 0
        self._slice_numbers = count(1)
        self._n_starved = 0  # decoding sequences that wait for a page, which new sequences may not take
        self._ahead = self._open_ahead(model) if steps_ahead else None

    @property
    def info(self) -> EngineInfo:
        return self.model.info

    @property
    def memory(self) -> memoryview | DeviceBytes:
        return self.model.memory

    @property
    def memory_address(self) -> int:
        return self.model.memory_address

    @property
    def page_parts(self) -> PageParts | None:
        return self.model.page_parts

    def read_page(self, page: int, *, has_landed: bool = False) -> memoryview:
        return self._copies.read(page, has_landed=has_landed)

    def close(self) -> None:
        self.model.close()

    # ---- life of a sequence

    @locked
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
        # The cache never supplies the block of the last token, which is computed here or handed over.
        n_reusable = (spec.context_tokens - 1) // block_tokens
        hit = self._blocks.match(sequence.full_block_hashes(0 if sequence.scores_prompt else n_reusable))
        sequence.pages = self._blocks.reserve(hit, n_pages - len(hit), leave=self._awaited())
        sequence.n_computed = len(hit) * block_tokens
        sequence.n_committed_blocks = len(hit)
        self._sequences[spec.seq_id] = sequence
        return PageReservation(spec.seq_id, tuple(sequence.pages), sequence.n_computed)

    @locked
    def receive(self, seq_id: str, n_tokens: int) -> None:
        sequence = self._reserved(seq_id)
        sequence.check_fill(n_tokens)
        pages = sequence.pages_until(n_tokens)
        with self._copied.copying(pages):
            self._copies.receive(pages)
        if self._sequences.get(seq_id) is not sequence:
            raise NotFound(f"no sequence {seq_id}: it was released meanwhile")
        sequence.n_received = n_tokens

    @locked
    def fill(self, seq_id: str, n_tokens: int) -> None:
        sequence = self._reserved(seq_id)
        sequence.check_fill(n_tokens)
        if self.page_parts is not None and n_tokens > max(sequence.n_received, sequence.n_computed):
            raise FailedPrecondition(f"{seq_id}: filled to {n_tokens}, received to {sequence.n_received}")
        sequence.n_computed = n_tokens
        # Without the block of the last token, because this engine may still compute it into this page.
        sequence.commit_blocks(min(n_tokens, sequence.n_tokens - 1), self._blocks)

    @locked
    def exchange(self, seq_id: str, pages: Sequence[int]) -> PageReservation:
        return self._reserved(seq_id).exchange(pages, self._blocks, leave=self._awaited())

    @locked
    def start(
        self,
        seq_id: str,
        *,
        first_token: int | None = None,
        features: FeatureArray | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        sequence = self._reserved(seq_id)
        sequence.constraint = constraint
        context = sequence.n_tokens
        if first_token is None:
            sequence.n_computed = min(sequence.n_computed, context - 1)
            sequence.restore_features(self._features)
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

    @locked
    def want_features(self, seq_id: str, *, wanted: bool) -> None:
        if (sequence := self._sequences.get(seq_id)) is not None:
            sequence.wants_features = wanted

    @locked
    def release(self, seq_id: str) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._blocks.release(sequence.pages)
        self._step_abort.remove(seq_id)

    def abandon(self, seq_id: str) -> None:
        self._step_abort.abandon(seq_id)

    @locked
    def try_release(self, seq_id: str) -> bool:
        if self._step_abort.is_running(seq_id):
            return False
        self.release(seq_id)
        return True

    @locked
    def pin(self, pages: Sequence[int]) -> None:
        self._pins.pin(pages)

    @locked
    def pin_blocks(self, blocks: Sequence[FullBlock]) -> tuple[FullBlock, ...]:
        return self._pins.pin_blocks(blocks)

    @locked
    def poll_block_changes(self) -> list[PageChange]:
        return self._blocks.poll_changes()

    @locked
    def unpin(self, pages: Sequence[int], *, evict_first: bool = False) -> None:
        self._pins.unpin(pages, evict_first=evict_first)

    @locked
    def sequences(self) -> list[EngineSequence]:
        """The sequences that are not released, for inspection only."""
        return list(self._sequences.values())

    # ---- the loop

    @locked
    def step(
        self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS, *, features: bool = True
    ) -> list[StepOutput]:
        outputs = self._report_finished()
        if self._ahead is not None:
            may_launch = not (features and self.info.feature_width)
            known = self._ahead.step(self._sequences, drafts, may_launch=may_launch)
            if known is not None:
                self._shares.observe(())
                self._n_starved = self._ahead.n_starved
                return outputs + known
        prefilling = [s for s in self._sequences.values() if s.state is SequenceState.PREFILLING]
        self._shares.observe([sequence.spec.salt for sequence in prefilling])
        copied = self._shared.copy_new(prefilling)
        # Other threads may release sequences while pages are copied.
        prefilling = [s for s in prefilling if s.spec.seq_id in self._sequences]
        copied = {seq_id: n_tokens for seq_id, n_tokens in copied.items() if seq_id in self._sequences}
        for seq_id in copied:
            self._sequences[seq_id].restore_features(self._features)
        candidates, starved = find_candidates(
            self._sequences.values(),
            drafts,
            self._shared.followers(prefilling),
            shares=self._shares,
            blocks=self._blocks,
            info=self.info,
        )
        self._n_starved = len(starved)
        slices = schedule(candidates, self._limits)
        computed = {piece.seq_id for piece in slices}
        outputs += [self._progress(i, n_tokens) for i, n_tokens in copied.items() if i not in computed]
        if not slices:
            return outputs + self._fail_one(starved)
        rows = [self._rows(s, drafts) for s in slices]
        result = self._compute(rows, want_features=features and self._want_features(rows))
        if result is None:  # aborted: copied blocks stay valid, and a later step computes the rows again
            return outputs + [self._progress(i, n_tokens) for i, n_tokens in copied.items() if i in computed]
        add_waited_tokens(prefilling, rows)
        charge_rows(self._shares, prefilling, rows)
        for part in rows:
            self._sequences[part.seq_id].last_slice = next(self._slice_numbers)
        return outputs + [
            commit_outputs(
                self._sequences[part.rows.seq_id],
                part,
                self._blocks,
                self._features,
                max_context_tokens=self.info.max_context_tokens,
            )
            for part in split_result(result, rows, slices, copied)
        ]

    @locked
    def has_work(self) -> bool:
        if self._ahead is not None and self._ahead.has_step:
            return True
        return any(
            s.state in (SequenceState.PREFILLING, SequenceState.DECODING) for s in self._sequences.values()
        )

    @locked
    def ledger(self) -> EngineLedger:
        return count_ledger(
            self._blocks,
            self._sequences.values(),
            pinned_pages=len(self._pins),
            pages_awaited=self._awaited(),
            launched_pages=self._copied.count_pages()
            + (self._ahead.count_pages() if self._ahead is not None else 0),
            steps_aborted=self._step_abort.n_aborted,
        )

    @locked
    def check(self) -> None:
        """Raise Internal when page counts are inconsistent."""
        self._blocks.check()

    # ---- parts of a step

    def _open_ahead(self, model: StepModel) -> AheadLoop:
        if not isinstance(model, AheadModel):
            raise FailedPrecondition(f"{type(model).__name__} cannot begin a step before the last one ends")
        return AheadLoop(
            model,
            self._blocks,
            self._features,
            limits=self._limits,
            slice_numbers=self._slice_numbers,
            step_abort=self._step_abort,
            state_lock=self.state_lock,
        )

    def _awaited(self) -> int:
        """Pages kept for decoding sequences that lack one. Without work there are no such sequences."""
        return self._n_starved if self.has_work() else 0

    def _report_finished(self) -> list[StepOutput]:
        """Outputs of sequences that ended with the first token, the argument of `start`."""
        outputs = []
        for seq_id, sequence in self._sequences.items():
            if sequence.state is SequenceState.DECODING and sequence.finish is not None:
                sequence.state = SequenceState.FINISHED
                outputs.append(StepOutput(seq_id, (), sequence.n_computed, finish=sequence.finish))
        return outputs

    def _fail_one(self, starved: list[EngineSequence]) -> list[StepOutput]:
        """Fail the youngest sequence that lacks a page; its release lets the others continue."""
        if not starved or any(s.state is SequenceState.FAILED for s in self._sequences.values()):
            return []
        youngest = max(starved, key=lambda s: s.arrival)
        return [fail(youngest, OutOfPages(f"no KV page left after {youngest.n_tokens} tokens"))]

    def _rows(self, piece: Slice, drafts: Mapping[str, Sequence[int]]) -> SequenceRows:
        sequence = self._sequences[piece.seq_id]
        guesses = drafts[piece.seq_id][: piece.n_drafts] if piece.n_drafts else ()
        return sequence.rows(piece.n_tokens, guesses)

    def _compute(self, rows: Sequence[SequenceRows], *, want_features: bool) -> StepResult | None:
        """Run the rows; None when the step was aborted."""
        batch = lay_out(rows, block_tokens=self.info.block_tokens, want_features=want_features)
        aborted = False
        self._step_abort.begin({part.seq_id: part.n_rows for part in rows})
        try:
            with self.state_lock.released():
                return self.model.run(batch, rows, self._step_abort.flag)
        except StepAborted:
            aborted = True
            return None
        finally:
            self._step_abort.end(aborted=aborted)

    def _want_features(self, rows: Sequence[SequenceRows]) -> bool:
        if not self.info.feature_width:
            return False
        wanting = [r for r in rows if self._sequences[r.seq_id].wants_features]
        return any(
            r.n_sampled or len(r.tokens) > self._sequences[r.seq_id].n_tokens - FEATURE_WINDOW_TOKENS
            for r in wanting
        )

    def _progress(self, seq_id: str, shared_tokens: int) -> StepOutput:
        return progress(self._sequences[seq_id], shared_tokens, self._blocks, self._features)

    def _reserved(self, seq_id: str) -> EngineSequence:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise NotFound(f"no sequence {seq_id}")
        if sequence.state is not SequenceState.RESERVED:
            raise FailedPrecondition(f"sequence {seq_id} is {sequence.state.value}")
        return sequence

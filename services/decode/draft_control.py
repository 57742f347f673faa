"""The drafts of a step: the gate's question before a step, and its measurement after it.

Both kinds of Speculation ask `begin` on the engine's thread, when EngineThread asks them for drafts.

Time counts from the end of one step to the end of the next one, as long as the same sequences run. That
covers all that drafts cost a decode worker, also between its steps. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from libs.engine.step.types import FEATURE_WINDOW_TOKENS, StepOutput
from services.decode.draft_gate import DraftGate, DraftMode
from services.decode.step_costs import DEFAULT_CONFIDENCE, least_confidence

# Consecutive rows from which a head drafts nearly as well as with all of them. On the shipped model 128 rows
# give 3.96 tokens a step, 64 give 3.68, and FEATURE_WINDOW_TOKENS give 4.15.
WHOLE_ROWS = 128


@dataclass(slots=True)
class _RunningSequence:
    context_tokens: int = 0
    has_all: bool = True  # rows since its prompt: no step of it ran without features
    n_rows: int = 0  # since the last step without features
    setup_ms: float = 0.0
    tokens: int = 0

    @property
    def is_whole(self) -> bool:
        return self.has_all or self.n_rows >= WHOLE_ROWS

    def add(self, n_tokens: int, *, has_features: bool) -> None:
        """A step gave it `n_tokens`."""
        self.tokens += n_tokens
        self.has_all = self.has_all and has_features
        self.n_rows = self.n_rows + n_tokens if has_features else 0


@dataclass(slots=True)
class _StepBegun:
    mode: DraftMode
    began_ms: float
    seq_ids: frozenset[str]
    context_tokens: int
    setup_ms: float = 0.0


@dataclass(slots=True)
class _Rest:
    """Steps without a measure. `left_steps` counts the last one, whose end is that of the rest."""

    began_ms: float
    n_sequences: int
    context_tokens: int
    n_steps: int
    left_steps: int


@dataclass(slots=True)
class DraftControl:
    """One for a decode worker. Without a gate, drafts are always on.

    While a gate is closed, most steps rest: nothing begins or ends them here. Both calls took 4 % of a step
    of one sequence of the shipped model. A sequence that begins or ends also ends the rest.
    """

    gate: DraftGate | None
    clock_ms: Callable[[], float]
    mode: DraftMode = DraftMode.OFF
    _running: dict[str, _RunningSequence] = field(default_factory=dict)
    _ids: frozenset[str] | None = None  # of those that run; None once they have changed
    _total_tokens: int = 0  # of their contexts
    _begun: _StepBegun | None = None
    _rest: _Rest | None = None
    _was_measured: bool = False  # the step that ended last
    _ended_ms: float | None = None
    _ended_ids: frozenset[str] = frozenset()

    def open(self, seq_id: str, *, n_rows: int, context_tokens: int) -> None:
        """A sequence begins. `n_rows`: of its prompt's end, whose features are known."""
        self._forget(seq_id)
        has_all = n_rows >= max(context_tokens, 1)
        self._total_tokens += context_tokens
        self._running[seq_id] = _RunningSequence(context_tokens, has_all, n_rows)

    def close(self, seq_id: str) -> None:
        """A sequence ended. Idempotent."""
        sequence = self._forget(seq_id)
        if sequence is not None and self.gate is not None and sequence.setup_ms:
            self.gate.record_setup(sequence.setup_ms, sequence.tokens)

    def _forget(self, seq_id: str) -> _RunningSequence | None:
        self._end_rest()
        sequence = self._running.pop(seq_id, None)
        self._ids = None
        self._total_tokens -= 0 if sequence is None else sequence.context_tokens
        return sequence

    def prompt_rows(self, context_tokens: int) -> int:
        """How many rows of its prompt one more sequence would use; 0 while drafts do not pay."""
        n_sequences = len(self._running) + 1
        total_tokens = context_tokens + self._total_tokens
        wanted = self.gate is None or self.gate.wants_contexts(n_sequences, total_tokens // n_sequences)
        return FEATURE_WINDOW_TOKENS if wanted else 0

    def begin(self, *, available: bool) -> DraftMode:
        """The mode of the step that begins. `available`: there is a drafter."""
        n_sequences = len(self._running)
        context_tokens = self._mean_context()
        if not available or not n_sequences:
            self.mode = DraftMode.OFF
        elif self.gate is None:
            self.mode = DraftMode.ON
        else:
            is_asked = self.gate.is_gathering
            whole = not is_asked or all(sequence.is_whole for sequence in self._running.values())
            self.mode = self.gate.choose(n_sequences, context_tokens, is_whole=whole)
        if self._ids is None:
            self._ids = frozenset(self._running)
        self._begun = _StepBegun(self.mode, self.clock_ms(), self._ids, context_tokens)
        return self.mode

    def rest(self) -> None:
        """Let the next steps rest, if the gate allows it. The last one had no drafts, and no features."""
        n_sequences, context_tokens = len(self._running), self._mean_context()
        if self.gate is None or self._ended_ms is None or not self._was_measured:
            return
        n_steps = self.gate.rest_steps(n_sequences, context_tokens)
        if n_steps:
            self._rest = _Rest(self._ended_ms, n_sequences, context_tokens, n_steps, n_steps)

    @property
    def is_resting(self) -> bool:
        """Whether the step that begins rests."""
        return self._rest is not None

    def rests_on(self) -> bool:
        """Whether the step that ends needs no `end`: it rests, and the next one, too."""
        rest = self._rest
        if rest is None:
            return False
        rest.left_steps -= 1
        if rest.left_steps:
            return True
        self._end_rest()
        return False

    def _end_rest(self) -> None:
        rest, self._rest = self._rest, None
        if rest is None or self.gate is None:
            return
        n_steps = rest.n_steps - rest.left_steps
        for sequence in self._running.values():
            # A plain step gives each one. That of the last step comes with its `end`.
            sequence.tokens += n_steps - (rest.left_steps == 0)
        self.gate.record_rest(
            rest.n_sequences,
            rest.context_tokens,
            elapsed_ms=self.clock_ms() - rest.began_ms,
            n_steps=n_steps,
        )
        # A step that rests may be running: its time counts neither as one that began nor from the last end.
        self._begun, self._ended_ms = None, None

    def least_confidence(self) -> float:
        """The probability that a draft of the step that begins must have."""
        if self.gate is None:
            return DEFAULT_CONFIDENCE
        n_sequences = len(self._running)
        costs = self.gate.draft_costs(n_sequences, self._mean_context())
        return least_confidence(costs, n_sequences)

    def add_setup(self, seq_ids: Collection[str], elapsed_ms: float) -> None:
        """Record the time in which the head read contexts: a cost of whole sequences, not of the step."""
        if self._begun is not None:
            self._begun.setup_ms += elapsed_ms
        for seq_id in seq_ids:
            if seq_id in self._running:
                self._running[seq_id].setup_ms += elapsed_ms / len(seq_ids)

    def count_drafts(self, outputs: Sequence[StepOutput]) -> int:
        """The drafts of the step that ends."""
        return sum(output.proposed_drafts for output in outputs) if self.mode is DraftMode.ON else 0

    def end(self, outputs: Sequence[StepOutput], n_drafts: int) -> bool:
        """The step that began is complete. Returns whether a sequence ended with it."""
        begun, self._begun = self._begun, None
        now_ms, done, n_tokens = self.clock_ms(), False, 0
        for output in outputs:
            n_tokens += len(output.tokens)
            done = done or output.finish is not None or output.failure is not None
            sequence = self._running.get(output.seq_id)
            if sequence is not None:
                self._total_tokens += output.computed_tokens - sequence.context_tokens
                sequence.context_tokens = output.computed_tokens
                sequence.add(len(output.tokens), has_features=output.features is not None)
        ids = _ids_of(outputs, frozenset() if begun is None else begun.seq_ids)
        self._was_measured = begun is not None and self.gate is not None and ids == begun.seq_ids
        if begun is not None and self.gate is not None and self._was_measured:
            continues = self._ended_ms is not None and self._ended_ids == ids
            began_ms = self._ended_ms if continues and self._ended_ms is not None else begun.began_ms
            self.gate.record(
                begun.mode,
                len(ids),
                begun.context_tokens,
                elapsed_ms=now_ms - began_ms - begun.setup_ms,
                n_tokens=n_tokens,
                n_drafts=n_drafts,
                setup_ms=begun.setup_ms,
            )
        self._ended_ms, self._ended_ids = (None, frozenset()) if done else (now_ms, ids)
        return done

    def _mean_context(self) -> int:
        return self._total_tokens // max(len(self._running), 1)


def _ids_of(outputs: Sequence[StepOutput], likely: frozenset[str]) -> frozenset[str]:
    """The sequences of the outputs: `likely` itself where they are these, which most steps find."""
    if len(outputs) == len(likely):
        for output in outputs:
            if output.seq_id not in likely:
                break
        else:
            return likely
    return frozenset(output.seq_id for output in outputs)

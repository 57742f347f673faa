"""Rates of the engine, computed from the outputs of its steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libs.common.telemetry.counters import Counters
from libs.engine.step.types import StepOutput

_WEIGHT = 0.1  # the weight of a new sample in the running means


@dataclass(slots=True)
class _SequenceProgress:
    computed_tokens: int
    prefilling: bool


class StepStats:
    """Running means for the load report and totals for the metrics. Not thread-safe."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._progress: dict[str, _SequenceProgress] = {}
        # Of recent prompt tokens: the prompt tokens of their step, and its time.
        self._step_prefill_tokens = self._step_prefill_ms = 0.0
        self.decode_step_ms = 0.0
        # Of all steps so far.
        self.busy_ms = 0.0
        self.prefilled_tokens = 0
        self.generated_tokens = 0

    @property
    def prefill_tokens_per_s(self) -> float:
        """The prompt tokens of recent steps by their time; 0 if no prompt was computed yet.

        A step counts by its tokens: the rate of a short prompt, or of the end of a cached one, says little
        about a long one, which admission refuses where it seems late.
        """
        return self._step_prefill_tokens / self._step_prefill_ms * 1e3 if self._step_prefill_ms else 0.0

    def block_ms(self, block_tokens: int) -> float:
        """The time to compute one block of a prompt; 0 if no prompt was computed yet."""
        return block_tokens / self.prefill_tokens_per_s * 1e3 if self.prefill_tokens_per_s else 0.0

    def open(self, seq_id: str, *, computed_tokens: int, prefilling: bool) -> None:
        """Add a sequence that starts with KV of `computed_tokens` positions."""
        self._progress[seq_id] = _SequenceProgress(computed_tokens, prefilling)

    def close(self, seq_id: str) -> None:
        """Remove a released sequence. Idempotent."""
        self._progress.pop(seq_id, None)

    def record(
        self, outputs: Sequence[StepOutput], step_ms: float, *, draft_wait_ms: float | None = None
    ) -> None:
        """Add the outputs of one step to the means and counters."""
        self.busy_ms += step_ms
        prefilled = shared = decoded = proposed = accepted = 0
        for output in outputs:
            progress = self._progress.get(output.seq_id)
            if progress is None:
                continue
            if progress.prefilling:
                computed = output.computed_tokens - progress.computed_tokens - output.shared_tokens
                prefilled += max(computed, 0)
                shared += output.shared_tokens
                progress.prefilling = not output.tokens
            else:
                decoded += 1
            progress.computed_tokens = output.computed_tokens
            self.generated_tokens += len(output.tokens)
            proposed += output.proposed_drafts
            accepted += output.accepted_drafts
            if output.proposed_drafts:
                self._count_drafts(output)
        self._counters.observe("slipstream_engine_step_seconds", step_ms / 1e3)
        self.prefilled_tokens += prefilled
        if prefilled:
            self._counters.add("slipstream_prefill_tokens_total", prefilled)
            self._add_prefill_rate(prefilled, max(step_ms, 1e-3))
        if shared:
            self._counters.add("slipstream_prefill_tokens_shared_total", shared)
        if decoded:
            self._counters.observe("slipstream_decode_step_seconds", step_ms / 1e3)
            if draft_wait_ms is not None:
                self._counters.observe("slipstream_draft_wait_seconds", draft_wait_ms / 1e3)
            self.decode_step_ms = _mean(self.decode_step_ms, step_ms)
        if proposed:
            self._counters.add("slipstream_draft_tokens_proposed_total", proposed)
            self._counters.add("slipstream_draft_tokens_accepted_total", accepted)

    def _add_prefill_rate(self, n_tokens: int, step_ms: float) -> None:
        weight = min(_WEIGHT * n_tokens / (self._step_prefill_tokens or n_tokens), 1.0)
        self._step_prefill_tokens = _mean(self._step_prefill_tokens, n_tokens, weight)
        self._step_prefill_ms = _mean(self._step_prefill_ms, step_ms, weight)

    def _count_drafts(self, output: StepOutput) -> None:
        """Count a sequence's drafts by position and by the length of its context."""
        add = self._counters.add
        add("slipstream_drafts_verified_total")
        for position in range(output.accepted_drafts):
            add("slipstream_draft_tokens_accepted_by_position_total", 1, (str(position),))
        labels = (context_label(output.computed_tokens),)
        add("slipstream_drafts_proposed_by_context_total", output.proposed_drafts, labels)
        add("slipstream_drafts_accepted_by_context_total", output.accepted_drafts, labels)


def context_label(context_tokens: int) -> str:
    """The upper end of the context lengths among which this one counts."""
    for limit in (1, 4, 16, 64, 256):
        if context_tokens <= limit * 1024:
            return f"{limit}k"
    return "more"


def _mean(before: float, sample: float, weight: float = _WEIGHT) -> float:
    return sample if before == 0.0 else before + weight * (sample - before)

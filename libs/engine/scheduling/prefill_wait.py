"""Count how long each prompt waits, in tokens computed for other prompts (libs/common/prefill_order.py)."""

from __future__ import annotations

from collections.abc import Sequence

from libs.engine.kv.sequence import EngineSequence
from libs.engine.step.step_model import SequenceRows


def add_waited_tokens(prefilling: Sequence[EngineSequence], rows: Sequence[SequenceRows]) -> None:
    """Add to each prompt's wait the step's rows of other prompts, even if the prompt was not in the step."""
    own = {part.seq_id: part.n_rows for part in rows}
    computed = [own.get(sequence.spec.seq_id, 0) for sequence in prefilling]
    step_tokens = sum(computed)
    for sequence, n_rows in zip(prefilling, computed, strict=True):
        sequence.waited_tokens += step_tokens - n_rows

"""How long prompts wait for others, counted in what was computed for those (libs/common/prefill_order.py)."""

from __future__ import annotations

from collections.abc import Sequence

from libs.engine.kv.sequence import EngineSequence
from libs.engine.step.step_model import SequenceRows


def count_waits(prefilling: Sequence[EngineSequence], rows: Sequence[SequenceRows]) -> None:
    """A step was computed: to each prompt in it or beside it, the rows of the other prompts were a wait."""
    own = {part.seq_id: part.n_rows for part in rows}
    computed = [own.get(sequence.spec.seq_id, 0) for sequence in prefilling]
    step_tokens = sum(computed)
    for sequence, n_rows in zip(prefilling, computed, strict=True):
        sequence.waited_tokens += step_tokens - n_rows

"""The masks of a step, computed beside the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from libs.engine.step.constraint import StepMasks
from libs.engine.step.step_model import SequenceRows


class MaskThread:
    """Computes masks on a second thread while the model computes, so that steps do not wait for them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, sequences: Sequence[SequenceRows], vocab_size: int) -> Callable[[], StepMasks | None]:
        """Start to compute the masks of these rows; call the result to wait for them.

        The thread gets only work that takes longer than handing it over.
        """
        held = [s for s in sequences if s.constraint is not None and s.n_sampled]
        if not held:
            return _no_masks
        if not any(s.constraint is not None and s.constraint.needs_mask(s.drafts) for s in held):
            free = compute_masks(sequences, vocab_size)
            return lambda: free
        masks: Future[StepMasks | None] = self._thread.submit(compute_masks, sequences, vocab_size)
        return masks.result


def _no_masks() -> None:
    return None


def compute_masks(sequences: Sequence[SequenceRows], vocab_size: int) -> StepMasks | None:
    """The masks of the sampled rows; None when no sequence has a constraint."""
    work = []
    rows: list[int] = []
    first = 0
    for sequence in sequences:
        if sequence.constraint is not None and sequence.n_sampled:
            work.append((sequence.constraint, sequence.drafts))
            rows += range(first, first + sequence.n_sampled)
        first += sequence.n_sampled
    if not work:
        return None
    masks = np.zeros((len(rows), -(-vocab_size // 32)), dtype=np.int32)
    banned = work[0][0].filler.fill(work, masks)
    kept = [i for i, tokens in enumerate(banned) if tokens is None]
    return StepMasks(
        masked=[rows[i] for i in kept],
        masks=masks[kept],
        banned=[(rows[i], token) for i, tokens in enumerate(banned) for token in tokens or ()],
    )

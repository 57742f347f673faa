"""Computes the masks of all constrained rows of a step, in parallel and without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLExecutor, LLMatcher

from libs.structured.constraint import Banned, GrammarConstraint, MaskRows, Phase


class GrammarMasks:
    """Implements the engine's `MaskFiller`. One call at a time."""

    def __init__(self, n_threads: int) -> None:
        self._executor = LLExecutor(num_threads=n_threads)

    def fill(self, work: Sequence[tuple[GrammarConstraint, Sequence[int]]], masks: MaskRows) -> list[Banned]:
        """Write the masks of each constraint and its drafts, row after row.

        Returns for each row None, or the tokens that it may not sample when it needs no mask.
        """
        banned: list[Banned] = []
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for constraint, drafts in work:
            row = len(banned)
            if constraint.phase is not Phase.HELD or constraint.failure or constraint.guard is not None:
                banned += constraint.fill(drafts, masks[row:])
                continue
            if drafts:
                drafted.append((constraint.matcher, row, list(drafts)))
            else:
                plain.append((constraint.matcher, row))
            banned += [None] * (1 + len(drafts))
        where = (masks.ctypes.data, masks.shape[1] * masks.itemsize, masks.shape[0])
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        for constraint, _ in work:
            constraint.note_failure()
        return banned

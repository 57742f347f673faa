"""Computes the masks of all constrained rows of a step, in parallel and without the interpreter's lock.

The masks of an ambiguous grammar take longer with each token, up to seconds. All sequences of a worker wait
for them. So a step's masks have a limit of time, and the costliest sequences beyond it fail. The looks for
the end of answers since the last step have the same limit; beyond it the costliest answers may be cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from llguidance import LLExecutor, LLMatcher

from libs.structured.constraint import Banned, GrammarConstraint, MaskRows, Phase
from libs.structured.grammar_check import MAX_MASK_S

# A grammar may be slow at some tokens only.
_MEASURED_STEPS = 16

Work = Sequence[tuple[GrammarConstraint, Sequence[int]]]


class GrammarMasks:
    """Implements the engine's `MaskFiller`. One call at a time.

    The executor does not measure its threads. So the steps after a slow one compute their masks one
    by one, and measure each. A mask that is slow once, as the first of a large grammar is, fails nothing.
    """

    def __init__(
        self,
        n_threads: int,
        *,
        limit_s: float = MAX_MASK_S,
        now_s: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._executor = LLExecutor(num_threads=n_threads)
        self._limit_s = limit_s
        self._now_s = now_s
        self._cpu_s = cpu_s
        self._n_measured = 0  # steps from now on

    def fill(self, work: Work, masks: MaskRows) -> list[Banned]:
        """Write the masks of each constraint and its drafts, row after row.

        Returns for each row None, or the tokens that it may not sample when it needs no mask.
        """
        looks_s = [constraint.take_look_s() for constraint, _ in work]
        for number in costliest(looks_s, self._limit_s):
            work[number][0].stop_looking()
        began_s = self._now_s()
        if self._n_measured:
            self._n_measured -= 1
            banned = self._fill_measured(work, masks)
        else:
            banned = self._fill_together(work, masks)
        if self._now_s() - began_s > self._limit_s:
            self._n_measured = _MEASURED_STEPS
        return banned

    def _fill_measured(self, work: Work, masks: MaskRows) -> list[Banned]:
        banned: list[Banned] = []
        took_cpu_s = []
        for constraint, drafts in work:
            began_s = self._cpu_s()
            banned += constraint.fill(drafts, masks[len(banned) :])
            took_cpu_s.append(self._cpu_s() - began_s)
        for number in costliest(took_cpu_s, self._limit_s):
            constraint = work[number][0]
            constraint.failure = constraint.failure or "is too complex: its tokens take too long"
        return banned

    def _fill_together(self, work: Work, masks: MaskRows) -> list[Banned]:
        banned: list[Banned] = []
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for constraint, drafts in work:
            row = len(banned)
            has_guard = constraint.guard is not None
            if constraint.phase is not Phase.CONSTRAINED or constraint.failure or has_guard:
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


def costliest(costs_s: Sequence[float], limit_s: float) -> list[int]:
    """The fewest numbers of `costs_s` without which the rest sums up to at most `limit_s`. Pure."""
    excess_s = sum(costs_s) - limit_s
    found = []
    for number in sorted(range(len(costs_s)), key=lambda i: -costs_s[i]):
        if excess_s <= 0:
            break
        excess_s -= costs_s[number]
        found.append(number)
    return found

"""Times of recent steps, robust against single slow ones. Pure."""

from __future__ import annotations

import collections
import statistics
from typing import NamedTuple

# A slower step counts as this many medians: a preempted process shows nothing about drafts.
OUTLIER_MEDIANS = 4.0
_LEAST_CONFIDENCE, _MOST_CONFIDENCE = 0.1, 0.7
DEFAULT_CONFIDENCE = 0.4
_SETUPS = 16


class _StepCost(NamedTuple):  # of each step, also where drafts are off: a dataclass takes three times as long
    elapsed_ms: float
    tokens: float  # of each sequence
    n_drafts: int


class StepWindow:
    """The last steps of one way of stepping."""

    def __init__(self, n_steps: int) -> None:
        self._steps: collections.deque[_StepCost] = collections.deque(maxlen=n_steps)
        self._cost_ms: float | None = None  # of these steps, once asked for: a gate asks several times a step

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) == self._steps.maxlen

    def add(self, elapsed_ms: float, tokens: float, n_drafts: int) -> None:
        """A step that advanced each sequence by `tokens` on average."""
        self._steps.append(_StepCost(elapsed_ms, tokens, n_drafts))
        self._cost_ms = None

    def clear(self) -> None:
        """Forget all."""
        self._steps.clear()
        self._cost_ms = None

    @property
    def last_ms(self) -> float:
        """The time of the newest step; 0 without steps."""
        return self._steps[-1].elapsed_ms if self._steps else 0.0

    @property
    def median_ms(self) -> float:
        """The median time of a step; 0 without steps."""
        return statistics.median([step.elapsed_ms for step in self._steps]) if self._steps else 0.0

    @property
    def cost_ms(self) -> float:
        """Time in which each sequence advances by a token; infinite without steps."""
        if self._cost_ms is None:
            tokens = sum([step.tokens for step in self._steps])
            self._cost_ms = sum(self._bounded()) / tokens if tokens else float("inf")
        return self._cost_ms

    @property
    def draft_ms(self) -> float | None:
        """Cost of one more draft in a step: the slope of time over drafts; None where they hardly differ."""
        if len(self._steps) < 2:
            return None
        drafts = [float(step.n_drafts) for step in self._steps]
        if statistics.pvariance(drafts) < 0.25:
            return None
        return max(statistics.linear_regression(drafts, self._bounded()).slope, 0.0)

    def _bounded(self) -> list[float]:
        bound = OUTLIER_MEDIANS * self.median_ms
        return [min(step.elapsed_ms, bound) for step in self._steps]


class SetupCosts:
    """What the last sequences with drafts cost before their first draft: a head takes in the context once."""

    def __init__(self) -> None:
        self._sequences: collections.deque[tuple[float, int]] = collections.deque(maxlen=_SETUPS)

    def add(self, setup_ms: float, n_tokens: int) -> None:
        """A sequence that ended after `n_tokens`."""
        self._sequences.append((setup_ms, n_tokens))

    @property
    def ms_per_token(self) -> float:
        """The time of one sequence's token, by medians; 0 without any."""
        if not self._sequences:
            return 0.0
        setup_ms = statistics.median([setup_ms for setup_ms, _ in self._sequences])
        return setup_ms / max(statistics.median([n_tokens for _, n_tokens in self._sequences]), 1)


def least_confidence(window: StepWindow | None, n_sequences: int) -> float:
    """The probability from which one more draft of one sequence is worth its cost.

    A right draft saves one sequence a token. That is worth the time of a token of all, over their number.
    """
    draft_ms = window.draft_ms if window is not None else None
    if window is None or draft_ms is None or not window.cost_ms:
        return DEFAULT_CONFIDENCE
    return min(max(draft_ms * n_sequences / window.cost_ms, _LEAST_CONFIDENCE), _MOST_CONFIDENCE)

"""Decides when a short prompt's prefill starts on a second worker as well. Pure.

This is the deferred hedge of Dean and Barroso, "The Tail at Scale" (2013). A second attempt begins once the
first has taken longer than most prefills, so only a few percent of the requests cost twice. A hedge needs a
bad tail (p99 far above the median), another prefill worker, and budget. It also needs a short, uncached
prompt: a cached prefix would be restored twice, and a long prompt computed twice.
"""

from __future__ import annotations

import bisect
import collections
from dataclasses import dataclass

SAMPLES = 256
MIN_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class HedgeLimits:
    """The thresholds and the budget. `bad_tail`: the least p99 / p50 of the time to first token for hedges.

    `budget_share`: how many hedges each prefill adds to the budget.
    """

    max_uncached_tokens: int = 2048
    bad_tail: float = 3.0
    after_percentile: float = 0.95
    min_wait_ms: float = 20.0
    budget_share: float = 0.05
    max_saved_hedges: float = 8.0


class HedgePolicy:
    """Samples the times to first token of short uncached prompts, and computes when to hedge."""

    def __init__(self, limits: HedgeLimits | None = None) -> None:
        self._limits = limits or HedgeLimits()
        self._samples_ms: collections.deque[float] = collections.deque()  # in order of time
        self._ordered_ms: list[float] = []  # the same samples, kept sorted, as each sort would take 40 us
        self._budget = 1.0

    def observe(self, first_token_ms: float, *, uncached_tokens: int) -> None:
        """Add a sample: the time between a prefill's start and its first token."""
        if uncached_tokens <= self._limits.max_uncached_tokens:
            if len(self._samples_ms) == SAMPLES:
                del self._ordered_ms[bisect.bisect_left(self._ordered_ms, self._samples_ms.popleft())]
            self._samples_ms.append(first_token_ms)
            bisect.insort(self._ordered_ms, first_token_ms)
            self._budget = min(self._budget + self._limits.budget_share, self._limits.max_saved_hedges)

    def wait_ms(self, *, uncached_tokens: int, cached_tokens: int, other_workers: int) -> float | None:
        """How long to wait for the first attempt before a hedge begins; None = no hedge."""
        limits = self._limits
        if other_workers < 1 or cached_tokens > uncached_tokens:
            return None
        if uncached_tokens > limits.max_uncached_tokens or len(self._samples_ms) < MIN_SAMPLES:
            return None
        ordered = self._ordered_ms
        p50, p99 = _at(ordered, 0.50), _at(ordered, 0.99)
        if p99 < limits.bad_tail * max(p50, 1e-3):
            return None
        return max(_at(ordered, limits.after_percentile), limits.min_wait_ms)

    @property
    def has_budget(self) -> bool:
        """Whether the budget allows a hedge."""
        return self._budget >= 1.0

    def spend(self) -> bool:
        """Take a hedge from the budget. Returns False if none is left."""
        if not self.has_budget:
            return False
        self._budget -= 1.0
        return True


def _at(ordered: list[float], share: float) -> float:
    return ordered[int(share * len(ordered))]

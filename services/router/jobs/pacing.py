"""How many jobs run beside live requests, and how soon after them: learned from the live latency. Pure.

As in TCP Vegas, the latency of live requests that met jobs is compared with that of live requests alone. The
limit of jobs grows by one at a time and halves when live requests get slower. The pause after them shrinks by
a tenth and doubles. What has not proved itself is tried on so few live requests that their p99 does not move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from services.router.execution.policies.job_holds import LiveSample

# Live requests may be slower by this factor; the mean of their latencies differs by chance as well.
TOLERANCE = 1.05
SHORTEST_QUIET_S, LONGEST_QUIET_S = 0.05, 5.0
TRIED_QUIET_S = 0.25
# The share of live requests on which each of the two is tried. Together it is below the hundredth that p99
# leaves out.
TRIED_SHARE = 0.004
# The weight of a new sample in the means, and how many samples a mean needs.
_WEIGHT, _LEAST_SAMPLES = 0.1, 8
_MOST_TRIED = 16.0


@dataclass(slots=True)
class DecayingMean:
    """A mean whose first samples count fully and later ones by a fixed weight."""

    value: float = 0.0
    count: int = 0

    def add(self, sample: float) -> None:
        """Take a sample over."""
        self.count += 1
        self.value += max(_WEIGHT, 1 / self.count) * (sample - self.value)

    @property
    def is_known(self) -> bool:
        """Whether enough samples were seen."""
        return self.count >= _LEAST_SAMPLES


class LatencyBaseline:
    """The latency of live requests without jobs. Times to first token depend on the length of the prompt."""

    def __init__(self) -> None:
        self._ttft: dict[int, DecayingMean] = {}  # logarithms of ms, by the binary length of new tokens
        self._token = DecayingMean()

    @property
    def is_known(self) -> bool:
        """Whether there is something to compare with."""
        return any(bucket.is_known for bucket in self._ttft.values())

    def add(self, sample: LiveSample) -> None:
        """Take over a live request that met no job."""
        if sample.ttft_ms > 0:
            bucket = self._ttft.setdefault(max(0, sample.new_tokens).bit_length(), DecayingMean())
            bucket.add(math.log(sample.ttft_ms))
        if sample.token_ms > 0:
            self._token.add(math.log(sample.token_ms))

    def slowdown(self, sample: LiveSample, *, counts_tokens: bool) -> float | None:
        """The logarithm of the factor by which a request was slower; None = not known."""
        bucket = self._ttft.get(max(0, sample.new_tokens).bit_length())
        if bucket is None or not bucket.is_known or sample.ttft_ms <= 0:
            return None
        slower = math.log(sample.ttft_ms) - bucket.value
        if counts_tokens and self._token.is_known and sample.token_ms > 0:
            slower = max(slower, math.log(sample.token_ms) - self._token.value)
        return slower


@dataclass(slots=True)
class TrialBudget:
    """How many live requests may still meet what is on trial. Requests that end refill it from zero."""

    left: float = 0.0

    def refill(self) -> None:
        """A live request has ended."""
        self.left = min(self.left + TRIED_SHARE, _MOST_TRIED)

    def spend(self) -> None:
        """A live request has met what is on trial."""
        self.left = max(0.0, self.left - 1)  # overdue jobs are met without asking

    @property
    def has_any(self) -> bool:
        """Whether one more may."""
        return self.left >= 1


@dataclass(slots=True)
class JobPacing:
    """The two limits of jobs, which `observe` moves. `max_beside` is the operator's."""

    max_beside: int
    baseline: LatencyBaseline = field(default_factory=LatencyBaseline)
    _beside: float = 0.0
    _quiet_s: float = LONGEST_QUIET_S
    _slower_beside: DecayingMean = field(default_factory=DecayingMean)
    _slower_after: DecayingMean = field(default_factory=DecayingMean)
    _beside_budget: TrialBudget = field(default_factory=TrialBudget)
    _quiet_budget: TrialBudget = field(default_factory=TrialBudget)

    @property
    def beside(self) -> int:
        """Jobs that may run beside live requests; 1 is tried while the limit is 0."""
        if self._beside < 1:
            return min(1, self.max_beside) if self._may_try(self._beside_budget) else 0
        return min(int(self._beside), self.max_beside)

    @property
    def quiet_s(self) -> float:
        """How long after the last live request jobs begin to run; a short pause is tried at the longest."""
        is_tried = self._quiet_s >= LONGEST_QUIET_S and self._may_try(self._quiet_budget)
        return TRIED_QUIET_S if is_tried else self._quiet_s

    def observe(self, sample: LiveSample) -> None:
        """Learn from one live request."""
        self._beside_budget.refill()
        self._quiet_budget.refill()
        if not sample.met:
            self.baseline.add(sample)
            return
        slower = self.baseline.slowdown(sample, counts_tokens=bool(sample.beside))
        if sample.beside:
            self._move_beside(sample.beside, slower)
        else:
            self._move_quiet(slower)

    def _may_try(self, budget: TrialBudget) -> bool:
        return budget.has_any and self.baseline.is_known

    def _move_beside(self, beside: int, slower: float | None) -> None:
        if self._beside < 1:
            self._beside_budget.spend()
        if slower is None:
            return
        mean = self._slower_beside
        mean.add(slower)
        if not mean.is_known:
            return
        if mean.value > math.log(TOLERANCE):
            self._beside = self._beside / 2 if self._beside >= 2 else 0.0
            self._slower_beside = DecayingMean()
        elif beside >= int(self._beside):  # else the limit was not tried
            self._beside = min(self._beside + 1 / max(1.0, self._beside), float(self.max_beside))

    def _move_quiet(self, slower: float | None) -> None:
        quiet_s = self.quiet_s
        if self._quiet_s >= LONGEST_QUIET_S:
            self._quiet_budget.spend()
        if slower is None:
            return
        mean = self._slower_after
        mean.add(slower)
        if not mean.is_known:
            return
        if mean.value > math.log(TOLERANCE):
            self._quiet_s = min(LONGEST_QUIET_S, 2 * self._quiet_s)
            self._slower_after = DecayingMean()
        else:
            self._quiet_s = max(SHORTEST_QUIET_S, 0.9 * quiet_s)

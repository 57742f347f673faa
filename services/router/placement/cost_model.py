"""How long prefill, decode steps and reads of KV take on a worker, fitted to its reports. Pure.

A duration is a sum of known quantities times unknown rates, duration_ms = sum(rate_j * quantity_j). Each
report fits the rates again, by least squares on *relative* errors:

    minimise  sum_i m^age_i * ((y_i - rate . x_i) / max(y_i, rate . x_i))^2
            + prior_weight * sum_j ((rate_j - prior_j) / prior_j)^2       with  0 <= low_j <= rate_j <= high_j

So a report that is a hundred times too slow counts as one bad report and not as a hundred. The rate of a
rare quantity (a tier, a long prompt) stays near its prior. Predictions never fall when a quantity rises, and
no series of reports, however wrong, leads outside of the bounds. Old reports decay with `m`.
The normal equations have at most seven unknowns; each report costs a few sweeps of coordinate descent, fewer
once the rates are stable.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

import msgspec
from msgspec.structs import astuple

MEMORY_REPORTS = 64  # a report this old weighs 1/e
PRIOR_WEIGHT = 0.5  # reports that a prior is worth
ROLE_WEIGHT = 4.0  # reports of a worker that the rates of its role are worth
# A rate is at most this many times its prior, and at least its inverse times the prior.
MAX_OFF = 1e4
_FLOOR_MS = 0.05
_SWEEPS = 6
# A sweep that moves no rate by more than this share is the last: the next report continues.
_CONVERGED = 0.01


class RateFit:
    """Rates of one sum, as above. `prior` in milliseconds per unit of each quantity, all positive."""

    def __init__(self, prior: Sequence[float]) -> None:
        if not prior or min(prior) <= 0:
            raise ValueError("a prior is positive")
        self.reports = 0
        self._reports_at_decay = 0
        self.rates = list(prior)
        self._prior: tuple[float, ...] = ()
        self.set_prior(prior, PRIOR_WEIGHT)
        self._bounds = [(each / MAX_OFF, each * MAX_OFF) for each in prior]
        self._keep = 1.0 - 1.0 / MEMORY_REPORTS
        # The normal equations of the quantities in any report so far; the rates of the others stay at their
        # priors.
        self._seen: list[int] = []
        self._a: list[list[float]] = []
        self._b: list[float] = []

    def set_prior(self, prior: Sequence[float], weight: float) -> None:
        """Make these rates the prior, worth `weight` reports. The bounds stay."""
        weighted = (weight, *prior)
        if weighted == self._prior:
            return
        self._prior = weighted
        self._stiffness = [weight / (each * each) for each in prior]
        self._prior_pull = [weight / each for each in prior]  # stiffness times prior

    def predict_ms(self, quantities: Sequence[float]) -> float:
        """The duration of these quantities."""
        return sum([rate * x for rate, x in zip(self.rates, quantities, strict=True)])

    def observe(self, quantities: Sequence[float], duration_ms: float) -> None:
        """Add a report. A value that is no duration (negative, infinite, nan) is ignored."""
        if not 0.0 <= duration_ms < 1e9 or not any(quantities):
            return
        unseen: list[int] = []
        for j, quantity in enumerate(quantities):
            if not 0.0 <= quantity < 1e12:
                return
            if quantity and j not in self._seen:
                unseen.append(j)
        self.reports += 1
        for j in unseen:
            self._see(j)
        scale = 1.0 / max(duration_ms, self.predict_ms(quantities), _FLOOR_MS)
        x = [quantities[j] * scale for j in self._seen]
        y, keep, equations, b = duration_ms * scale, self._keep, self._a, self._b
        for i, x_i in enumerate(x):
            equations[i] = [a * keep + x_i * x_k for a, x_k in zip(equations[i], x, strict=True)]
            b[i] = b[i] * keep + x_i * y
        self._solve()

    def decay(self, kept: float) -> None:
        """Multiply the weight of all reports by `kept`, unless one was added since the last call: the rates
        return towards the prior."""
        if self.reports == self._reports_at_decay:
            self._a = [[a * kept for a in row] for row in self._a]
            self._b = [b * kept for b in self._b]
            self._solve()
        self._reports_at_decay = self.reports

    def _see(self, quantity: int) -> None:
        self._seen.append(quantity)
        for row in self._a:
            row.append(0.0)
        self._a.append([0.0] * len(self._seen))
        self._b.append(0.0)

    def _solve(self) -> None:
        seen, b, bounds = self._seen, self._b, self._bounds
        stiffness, prior_pull = self._stiffness, self._prior_pull
        rates = [self.rates[j] for j in seen]
        for _ in range(_SWEEPS):
            furthest = 0.0
            for i, row in enumerate(self._a):
                j, before = seen[i], rates[i]
                low, high = bounds[j]
                others = sum(map(mul, row, rates)) - row[i] * before
                rate = (b[i] - others + prior_pull[j]) / (row[i] + stiffness[j])
                if rate < low:
                    rate = low
                elif rate > high:
                    rate = high
                rates[i] = rate
                moved = abs(rate - before) / rate
                if moved > furthest:
                    furthest = moved
            if furthest < _CONVERGED:
                break
        for j, rate in zip(seen, rates, strict=True):
            self.rates[j] = rate


class PrefillModel(msgspec.Struct, frozen=True, gc=False):
    """A prefill worker's times. Defaults are a small model on a few CPU cores, until reports come."""

    request_ms: float = 5.0  # each request
    token_ms: float = 0.5  # each token computed
    attention_ms: float = 0.02  # each 1,000 pairs of a computed token and a token before it
    dram_token_ms: float = 0.02  # each token whose KV comes from a kvstore's memory
    nvme_token_ms: float = 0.05  # each token whose KV a kvstore takes from its disk, or from the pool
    peer_token_ms: float = 0.02  # each token whose KV comes from another prefill worker
    longer_token_ms: float = 0.06  # each token of prompts there that need more than this one

    def compute_ms(self, uncached_tokens: int, prompt_tokens: int) -> float:
        """Computing the last `uncached_tokens` of a prompt."""
        return self.compute_pairs_ms(uncached_tokens, attention_pairs(uncached_tokens, prompt_tokens))

    def compute_pairs_ms(self, uncached_tokens: int, pairs: float) -> float:
        """`compute_ms` with the `attention_pairs` of these tokens."""
        return self.request_ms + self.token_ms * uncached_tokens + self.attention_ms * pairs

    def queue_ms(self, tokens: int, requests: int, longer_tokens: int = 0) -> float:
        """Computing the prompts that are served first. `longer_tokens`: of prompts that need more, which may
        get a share of the time all the same."""
        return self.request_ms * requests + self.token_ms * tokens + self.longer_token_ms * longer_tokens

    def load_ms(self, dram_tokens: int, nvme_tokens: int, peer_tokens: int = 0) -> float:
        """Restoring KV from a kvstore, or from another prefill worker."""
        return (
            self.dram_token_ms * dram_tokens
            + self.nvme_token_ms * nvme_tokens
            + self.peer_token_ms * peer_tokens
        )


class DecodeModel(msgspec.Struct, frozen=True, gc=False):
    """The time of one decode step, that is of one token of each sequence, and of pulling KV."""

    step_base_ms: float = 10.0
    sequence_ms: float = 0.5  # each sequence in the batch
    context_ms: float = 0.2  # each 1,000 tokens of context in the batch
    pull_ms: float = 1.0  # each handoff
    pull_mib_ms: float = 1.0  # each MiB of KV

    def step_ms(self, sequences: int, context_tokens: int) -> float:
        """A step of so many sequences with so many tokens of context in all."""
        return self.step_base_ms + self.sequence_ms * sequences + self.context_ms * context_tokens * 1e-3

    def transfer_ms(self, n_bytes: int) -> float:
        """Pulling a prompt's KV."""
        return self.pull_ms + self.pull_mib_ms * n_bytes / (1 << 20)


def attention_pairs(uncached_tokens: int, prompt_tokens: int) -> float:
    """Thousands of (computed token, earlier token) pairs of a prompt's last `uncached_tokens`."""
    cached = prompt_tokens - uncached_tokens
    return uncached_tokens * (cached + uncached_tokens / 2) * 1e-3


class PrefillReport(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The time of a request on a prefill worker, send to first token, and what took it."""

    duration_ms: float
    uncached_tokens: int  # computed, of `prompt_tokens`
    prompt_tokens: int
    ahead_tokens: int = 0  # of `ahead_requests` that were served first
    ahead_requests: int = 0
    longer_tokens: int = 0  # of queued prompts that needed more
    dram_tokens: int = 0  # read from a kvstore's memory
    nvme_tokens: int = 0  # from its disk, or from the pool
    peer_tokens: int = 0  # from another prefill worker


class PrefillFit:
    """A prefill worker's model from the times of its requests."""

    def __init__(self, prior: PrefillModel | None = None) -> None:
        self._model: PrefillModel | None = None  # made at the first use after a report
        self._fit = RateFit(astuple(prior or PrefillModel()))

    @property
    def reports(self) -> int:
        """The number of reports."""
        return self._fit.reports

    @property
    def model(self) -> PrefillModel:
        """The current rates."""
        if self._model is None:
            self._model = PrefillModel(*self._fit.rates)
        return self._model

    def observe(self, report: PrefillReport) -> None:
        """Add a report."""
        quantities = (  # in the order of the rates of PrefillModel
            1.0 + report.ahead_requests,
            float(report.ahead_tokens + report.uncached_tokens),
            attention_pairs(report.uncached_tokens, report.prompt_tokens),
            float(report.dram_tokens),
            float(report.nvme_tokens),
            float(report.peer_tokens),
            float(report.longer_tokens),
        )
        self._fit.observe(quantities, report.duration_ms)
        self._model = None

    def set_prior_from(self, role: PrefillFit) -> None:
        """Make the rates of the role this worker's prior."""
        self._fit.set_prior(role._fit.rates, ROLE_WEIGHT)

    def decay(self, kept: float) -> None:
        """See `RateFit.decay`."""
        self._fit.decay(kept)
        self._model = None


class DecodeFit:
    """A decode worker's model from its load reports and its sequences' transfers."""

    def __init__(self, prior: DecodeModel | None = None) -> None:
        rates = astuple(prior or DecodeModel())
        self._model: DecodeModel | None = None
        self._step, self._pull = RateFit(rates[:3]), RateFit(rates[3:])

    @property
    def reports(self) -> int:
        """The number of reports."""
        return self._step.reports + self._pull.reports

    @property
    def model(self) -> DecodeModel:
        """The current rates."""
        if self._model is None:
            self._model = DecodeModel(*self._step.rates, *self._pull.rates)
        return self._model

    def observe_step(self, *, sequences: int, context_tokens: int, step_ms: float) -> None:
        """Add a step time and its batch."""
        if sequences:
            self._model = None
            self._step.observe((1.0, float(sequences), context_tokens * 1e-3), step_ms)

    def observe_pull(self, *, n_bytes: int, transfer_ms: float) -> None:
        """Add the transfer of a handoff."""
        if n_bytes:
            self._model = None
            self._pull.observe((1.0, n_bytes / (1 << 20)), transfer_ms)

    def set_prior_from(self, role: DecodeFit) -> None:
        """Make the rates of the role this worker's prior."""
        self._step.set_prior(role._step.rates, ROLE_WEIGHT)
        self._pull.set_prior(role._pull.rates, ROLE_WEIGHT)

    def decay(self, kept: float) -> None:
        """See `RateFit.decay`."""
        self._step.decay(kept)
        self._pull.decay(kept)
        self._model = None

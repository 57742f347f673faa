"""Whether drafts pay here and now: measured, not assumed. Pure; times are given.

Drafts save steps and cost work, waits and wider steps. What prevails depends on model, machine, text, batch
and context length. So the gate keeps the time of one token of a sequence in the way that runs now, and tries
the other way from time to time. Trials take a bounded share of the time, whatever one of them costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from services.decode.step_costs import SetupCosts, StepWindow


class DraftMode(Enum):
    """The drafts of a step. FEATURES computes what a drafter needs, and asks for nothing."""

    OFF = "off"
    FEATURES = "features"
    ON = "on"


@dataclass(frozen=True, slots=True)
class GateLimits:
    """`trial_share`: of all time, what trials of the worse way may cost. Steps are those of one bucket."""

    window_steps: int = 64
    baseline_steps: int = 16  # known of a way before the other one is tried
    feature_steps: int = 6  # with features alone at least, before drafts are tried
    gather_steps: int = 160  # with features alone at most: until the contexts of all sequences are whole
    skipped_steps: int = 2  # the first ones with drafts: the head takes in the context
    trial_steps: int = 16
    given_up_steps: int = 5  # after these, a trial at twice the cost ends
    checked_steps: int = 16  # how often drafts are compared with the last trial without them
    trial_share: float = 0.01
    longest_pause_ms: float = 120_000.0
    absent_steps: int = 192  # of batches of other buckets, amid a trial of drafts: then it is given up
    kept_steps: int = 32  # with features in a batch without drafts, after the last step of one with drafts
    margin: float = 0.02


class _TrialPhase(Enum):
    """A trial of drafts passes all of them, one of plain steps is measured at once."""

    SETTLED = 0
    GATHER = 1
    SKIPPED = 2
    TRIAL = 3


@dataclass(slots=True)
class _Bucket:
    """Batches of about one size, with contexts of about one length."""

    window: StepWindow
    trial: StepWindow
    features: StepWindow
    n_sequences: int
    on: bool = False
    phase: _TrialPhase = _TrialPhase.SETTLED
    steps_left: int = 0
    other_ms: float | None = None  # the other way's cost at its last trial
    settled_ms: float = 0.0  # since the last trial
    settled_steps: int = 0
    due_ms: float = 0.0
    trial_ms: float = 0.0  # all time of the running trial
    trial_tokens: float = 0.0


@dataclass(slots=True)
class DraftGate:
    """One for a decode worker. Batches of 1, 2-3, 4-7, ... sequences and contexts below 1k, 4k, 16k, ...
    tokens are judged apart; a new bucket begins with the verdict of its nearest neighbour, and with the pause
    of one with no more sequences.

    Drafts are tried in one bucket at a time, once the contexts of its sequences are whole: a head that lacks
    half of a context drafts half as well. Until the trial has ended, all batches compute features. So do
    batches without drafts for some steps after one with drafts: most come between two of these."""

    limits: GateLimits = field(default_factory=GateLimits)
    is_forced: bool = False  # drafts are always on; the gate measures what they cost
    feature_factor: float = 1.0  # a plain step with features, of one without
    setup: SetupCosts = field(default_factory=SetupCosts)
    _buckets: dict[tuple[int, int], _Bucket] = field(default_factory=dict)
    _tried: _Bucket | None = None  # where drafts are being tried
    _tried_steps: int = 0  # of all batches since that began
    _absent_steps: int = 0  # of these, those of other buckets
    _kept_steps: int = 0  # that still keep contexts whole after the last step with drafts

    def choose(self, n_sequences: int, context_tokens: int, *, is_whole: bool = True) -> DraftMode:
        """The mode of the next step of so many sequences with so many tokens on average.

        `is_whole`: the drafter would have enough of the context of each sequence.
        """
        bucket = self._bucket(n_sequences, context_tokens)
        if bucket.phase is _TrialPhase.SETTLED and self._is_due(bucket):
            self._begin(bucket)
        elif bucket.phase is _TrialPhase.GATHER and self._has_gathered(bucket, is_whole):
            bucket.phase, bucket.steps_left = _TrialPhase.SKIPPED, self.limits.skipped_steps
        return self._mode(bucket)

    def wants_contexts(self, n_sequences: int, context_tokens: int) -> bool:
        """Whether a sequence that begins now may have drafts: they are on, tried, or due to be tried."""
        bucket = self._bucket(n_sequences, context_tokens)
        return self._mode(bucket) is not DraftMode.OFF or self._is_due(bucket)

    def record(
        self,
        mode: DraftMode,
        n_sequences: int,
        context_tokens: int,
        *,
        elapsed_ms: float,
        n_tokens: int,
        n_drafts: int = 0,
    ) -> None:
        """A step took `elapsed_ms`, from the end of the step before it, and gave `n_tokens`.

        A step in another mode than `choose` said (the drafter was gone) is not counted.
        """
        if n_sequences < 1 or n_tokens < 1:
            return
        bucket = self._bucket(n_sequences, context_tokens)
        if mode is not self._mode(bucket):
            return
        tokens = n_tokens / n_sequences
        if bucket.phase is not _TrialPhase.SETTLED:
            self._record_trial(bucket, elapsed_ms, tokens, n_drafts)
        else:
            factor = self.feature_factor if mode is DraftMode.FEATURES else 1.0
            bucket.window.add(elapsed_ms / factor, tokens, n_drafts)
            bucket.settled_ms += elapsed_ms
            bucket.settled_steps += 1
        self._kept_steps = self.limits.kept_steps if bucket.on else max(self._kept_steps - 1, 0)
        if self._tried is not None:
            self._tried_steps += 1
            self._absent_steps += bucket is not self._tried
            if self._absent_steps >= self.limits.absent_steps:
                self._give_up(self._tried)

    def record_setup(self, setup_ms: float, n_tokens: int) -> None:
        """A sequence ended whose context took a head `setup_ms` to take in."""
        self.setup.add(setup_ms, n_tokens)

    def draft_costs(self, n_sequences: int, context_tokens: int) -> StepWindow | None:
        """The steps with drafts of this bucket; None before there are enough."""
        bucket = self._bucket(n_sequences, context_tokens)
        window = bucket.window if bucket.on else bucket.trial
        return window if len(window) >= self.limits.given_up_steps else None

    # ---- trials

    def _mode(self, bucket: _Bucket) -> DraftMode:
        if bucket.phase is _TrialPhase.GATHER or (bucket.on and bucket.phase is _TrialPhase.TRIAL):
            return DraftMode.FEATURES
        if bucket.on or bucket.phase is not _TrialPhase.SETTLED:
            return DraftMode.ON
        keeps_contexts = self._tried is not None or self._kept_steps > 0
        return DraftMode.FEATURES if keeps_contexts else DraftMode.OFF

    def _is_due(self, bucket: _Bucket) -> bool:
        if self.is_forced or len(bucket.window) < self.limits.baseline_steps:
            return False
        if bucket.on:
            return bucket.settled_ms >= bucket.due_ms or self._is_slower(bucket)
        return self._tried is None and bucket.settled_ms >= bucket.due_ms

    def _is_slower(self, bucket: _Bucket) -> bool:
        """Whether drafts now cost more than steps without them did; looked at once in a while."""
        is_looked_at = bucket.settled_steps and not bucket.settled_steps % self.limits.checked_steps
        if not is_looked_at or not bucket.window.is_full:
            return False
        own_ms = (bucket.window.cost_ms + self._setup(bucket)) * (1 - self.limits.margin)
        return bucket.other_ms is None or own_ms > bucket.other_ms

    def _begin(self, bucket: _Bucket) -> None:
        bucket.trial.clear()
        bucket.features.clear()
        bucket.trial_ms = bucket.trial_tokens = 0.0
        if bucket.on:
            bucket.phase, bucket.steps_left = _TrialPhase.TRIAL, self.limits.trial_steps
        else:
            bucket.phase, bucket.steps_left = _TrialPhase.GATHER, self.limits.gather_steps
            self._tried, self._tried_steps, self._absent_steps = bucket, 0, 0

    def _has_gathered(self, bucket: _Bucket, is_whole: bool) -> bool:
        return bucket.steps_left <= 0 or (is_whole and len(bucket.features) >= self.limits.feature_steps)

    def _record_trial(self, bucket: _Bucket, elapsed_ms: float, tokens: float, n_drafts: int) -> None:
        bucket.trial_ms += elapsed_ms
        bucket.trial_tokens += tokens
        bucket.steps_left -= 1
        if bucket.phase is _TrialPhase.GATHER:
            bucket.features.add(elapsed_ms, tokens, n_drafts)
        elif bucket.phase is _TrialPhase.TRIAL:
            bucket.trial.add(elapsed_ms, tokens, n_drafts)
            if bucket.steps_left <= 0 or self._is_slow_trial(bucket):
                self._judge(bucket)
        elif bucket.steps_left <= 0:
            bucket.phase, bucket.steps_left = _TrialPhase.TRIAL, self.limits.trial_steps

    def _is_slow_trial(self, bucket: _Bucket) -> bool:
        return (
            len(bucket.trial) >= self.limits.given_up_steps
            and bucket.trial.cost_ms > 2 * bucket.window.cost_ms
        )

    def _give_up(self, bucket: _Bucket) -> None:
        """Batches of this bucket became too rare: nothing is known, and their next trial waits."""
        excess_ms = max(bucket.trial_ms - bucket.trial_tokens * bucket.window.cost_ms, 0.0)
        self._settle(
            bucket, excess_ms + (self.feature_factor - 1) * self._tried_steps * bucket.window.median_ms
        )

    def _settle(self, bucket: _Bucket, excess_ms: float) -> None:
        """The trial has ended, and has cost `excess_ms`."""
        bucket.phase = _TrialPhase.SETTLED
        bucket.settled_ms, bucket.settled_steps = 0.0, 0
        bucket.due_ms = min(excess_ms / self.limits.trial_share, self.limits.longest_pause_ms)
        if self._tried is bucket:
            self._tried = None

    def _judge(self, bucket: _Bucket) -> None:
        own_ms, other_ms = bucket.window.cost_ms, bucket.trial.cost_ms
        if bucket.on:
            own_ms, other_ms = own_ms + self._setup(bucket), other_ms / self.feature_factor
        else:
            ratio = bucket.features.median_ms / max(bucket.window.median_ms, 1e-9)
            self.feature_factor += 0.3 * (min(max(ratio, 1.0), 1.25) - self.feature_factor)
            other_ms += self._setup(bucket)
        excess_ms = max(bucket.trial_ms - bucket.trial_tokens * own_ms, 0.0)
        if other_ms < own_ms * (1 - self.limits.margin):
            bucket.on = not bucket.on
            # A trial of the way that is left now costs about what this one has saved.
            excess_ms = max(own_ms - other_ms, 0.0) * self.limits.trial_steps
            own_ms, other_ms = other_ms, own_ms
            bucket.window.clear()
        bucket.other_ms = other_ms
        self._settle(bucket, excess_ms)

    def _setup(self, bucket: _Bucket) -> float:
        """Share of a token in the setups of all sequences of the batch: each one delays the others."""
        return bucket.n_sequences * self.setup.ms_per_token

    def _bucket(self, n_sequences: int, context_tokens: int) -> _Bucket:
        key = n_sequences.bit_length(), max(context_tokens.bit_length() - 9, 0) // 2
        bucket = self._buckets.get(key)
        if bucket is None:
            steps = self.limits.window_steps
            windows = StepWindow(steps), StepWindow(steps), StepWindow(steps)
            bucket = _Bucket(*windows, n_sequences, on=self.is_forced)
            if self._buckets:
                nearest_key = min(self._buckets, key=lambda other: _distance(key, other))
                nearest = self._buckets[nearest_key]
                bucket.on = nearest.on
                # Drafts that lost there wait here as long: else each new size of a batch begins with a trial.
                # In a smaller batch they may pay, because its steps have room for more rows.
                if not nearest.on and key[0] >= nearest_key[0]:
                    bucket.due_ms = nearest.due_ms
            self._buckets[key] = bucket
        return bucket


def _distance(key: tuple[int, int], other: tuple[int, int]) -> int:
    return 2 * abs(key[0] - other[0]) + abs(key[1] - other[1])

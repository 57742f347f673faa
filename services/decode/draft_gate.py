"""Whether drafts pay here and now: measured, not assumed. Pure; times are given.

Drafts save steps and cost work, waits and wider steps. What prevails depends on model, machine, text, batch
and context length. The gate measures the time of one token of a sequence in the way that runs now. It tries
the other way from time to time. Trials take a bounded share of the time, whatever one of them costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from services.decode.step_costs import OUTLIER_MEDIANS, SetupCosts, StepWindow

# Of limits where plain steps run ahead of the host (engine/core/ahead_steps.py): with features none does.
AHEAD_FEATURE_FACTOR = 4.0


class DraftMode(Enum):
    """The drafts of a step. FEATURES computes what a drafter needs, and asks for nothing."""

    OFF = "off"
    FEATURES = "features"
    ON = "on"


@dataclass(frozen=True, slots=True)
class GateLimits:
    """`trial_share`: of all time, what trials of the worse way may cost.

    `first_share`: the same just after drafts began. It halves with each trial that confirms them: steps of
    one moment, such as one without prefill beside it, may have begun them by mistake.
    """

    window_steps: int = 64
    baseline_steps: int = 16  # known of a bucket's plain steps before drafts are tried in it
    feature_steps: int = 6  # with features alone at least, before drafts are tried
    gather_steps: int = 160  # with features alone at most: until the contexts of all sequences are whole
    skipped_steps: int = 16  # at most, until drafts come: a head takes in the contexts first
    trial_steps: int = 16
    winning_steps: int = 48  # of a trial of the way that seems the better one
    absent_steps: int = 128  # of all batches in the stage with drafts: then the trial ends
    least_steps: int = 5  # after these, a trial with a clear verdict ends
    # A verdict is clear where costs differ by the factor exp(clear_gap / sqrt(steps * sequences)).
    clear_gap: float = 1.5
    checked_steps: int = 16  # how often drafts are compared with the last trial without them
    trial_share: float = 0.01
    first_share: float = 0.125
    longest_pause_ms: float = 120_000.0
    most_feature_factor: float = 1.25  # a plain step with features, of one without; at most
    kept_steps: int = 32  # with features in a batch without drafts, after the last step of one with drafts
    margin: float = 0.02
    rest_steps: int = 16  # that are not measured, from one that is to the next, while a trial is far


class _TrialPhase(Enum):
    """The stages of a trial of drafts, of all batches together."""

    NONE = 0
    GATHER = 1
    SKIPPED = 2
    DRAFTS = 3


@dataclass(slots=True)
class _Bucket:
    """Batches of about one size, with contexts of about one length."""

    key: tuple[int, int]
    n_sequences: int
    window: StepWindow  # in the way that runs now
    trial: StepWindow  # in the other way, or with features alone before that
    on: bool = False
    has_plain_trial: bool = False  # drafts are on, and steps without them are being tried
    other_ms: float | None = None  # the other way's cost at its last trial
    settled_ms: float = 0.0  # since the last trial
    settled_steps: int = 0
    due_ms: float = 0.0
    share: float = 0.0  # of the time with drafts until the next trial, what that trial may cost
    plain_ms: float = 0.0  # all time of the running trial without drafts
    plain_tokens: float = 0.0

    def settle(self, due_ms: float) -> None:
        """A trial has ended; the next one may begin in `due_ms`."""
        self.settled_ms, self.settled_steps, self.due_ms = 0.0, 0, due_ms

    def switch(self) -> None:
        """Change between steps with and without drafts."""
        self.on = not self.on
        self.window.clear()
        self.trial.clear()


@dataclass(slots=True)
class DraftGate:
    """One for a decode worker. Batches of 1, 2-3, 4-7, ... sequences and contexts below 1k, 4k, 16k, ...
    tokens are judged apart; a new bucket begins with the verdict of its nearest neighbour, and with the pause
    of one with no more sequences.

    A trial of drafts is one of all batches. Their number of sequences changes within a few steps, and drafts
    that stop in between cost what the trial asks about. It begins once the contexts of all sequences are
    whole: a head that lacks half of a context drafts half as well. It ends where one bucket has enough steps,
    and judges all that have `least_steps`. Batches without drafts keep features for some steps after one with
    drafts: most come between two of these.
    """

    limits: GateLimits = field(default_factory=GateLimits)
    is_forced: bool = False  # drafts are always on; the gate measures what they cost
    feature_factor: float = 1.0  # a plain step with features, of one without
    setup: SetupCosts = field(default_factory=SetupCosts)
    _buckets: dict[tuple[int, int], _Bucket] = field(default_factory=dict)
    _trial: _TrialPhase = _TrialPhase.NONE
    _stage_steps: int = 0  # of all batches in this stage of the trial
    _excess_ms: float = 0.0  # what the trial has cost so far
    _knows_features: bool = False  # `feature_factor` is measured
    _kept_steps: int = 0  # that still keep contexts whole after the last step with drafts
    _last: tuple[int, int, _Bucket] | None = None  # the bucket that was asked for last

    @property
    def is_gathering(self) -> bool:
        """Whether the next verdict depends on the sequences' contexts."""
        return self._trial is _TrialPhase.GATHER

    def choose(self, n_sequences: int, context_tokens: int, *, is_whole: bool = True) -> DraftMode:
        """The mode of the next step of so many sequences with so many tokens on average.

        `is_whole`: the drafter would have enough of the context of each sequence.
        """
        bucket = self._bucket(n_sequences, context_tokens)
        if self._is_due(bucket):
            self._begin(bucket)
        elif self._trial is _TrialPhase.GATHER and self._has_gathered(is_whole):
            self._measure_features()
            self._enter(_TrialPhase.SKIPPED)
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
        setup_ms: float = 0.0,
    ) -> None:
        """A step took `elapsed_ms`, from the end of the step before it, and gave `n_tokens`.

        `setup_ms` went into contexts besides: a cost of the trial, and of whole sequences (`record_setup`).
        A step in another mode than `choose` said (the drafter was gone) is not counted.
        """
        if n_sequences < 1 or n_tokens < 1:
            return
        bucket = self._bucket(n_sequences, context_tokens)
        if mode is not self._mode(bucket):
            return
        tokens = n_tokens / n_sequences
        if bucket.has_plain_trial:
            self._record_plain(bucket, elapsed_ms, tokens)
        elif bucket.on or not self._is_tried(bucket):
            factor = self.feature_factor if mode is DraftMode.FEATURES else 1.0
            bucket.window.add(elapsed_ms / factor, tokens, n_drafts)
            bucket.settled_ms += elapsed_ms
            bucket.settled_steps += 1
            self._excess_ms += elapsed_ms * (1 - 1 / factor)
        else:
            self._excess_ms += elapsed_ms + setup_ms - tokens * bucket.window.cost_ms
            if self._trial is not _TrialPhase.SKIPPED:
                bucket.trial.add(elapsed_ms, tokens, n_drafts)
        self._kept_steps = self.limits.kept_steps if bucket.on else max(self._kept_steps - 1, 0)
        self._advance(bucket, has_drafts=n_drafts >= n_sequences)

    def rest_steps(self, n_sequences: int, context_tokens: int) -> int:
        """How many of the next steps need no measure: drafts are off, and a trial finds a new full window."""
        bucket = self._bucket(n_sequences, context_tokens)
        if self._mode(bucket) is not DraftMode.OFF or not bucket.window.is_full:
            return 0
        measured_ms = 2 * self.limits.window_steps * bucket.window.last_ms
        is_far = bucket.due_ms - bucket.settled_ms > measured_ms
        return self.limits.rest_steps if is_far else 0

    def record_rest(self, n_sequences: int, context_tokens: int, *, elapsed_ms: float, n_steps: int) -> None:
        """Steps that were not measured took so long together. Pauses between them do not count."""
        bucket = self._bucket(n_sequences, context_tokens)
        if not bucket.on:
            bucket.settled_ms += min(elapsed_ms, n_steps * OUTLIER_MEDIANS * bucket.window.median_ms)

    def record_setup(self, setup_ms: float, n_tokens: int) -> None:
        """A sequence ended whose context took a head `setup_ms` to take in."""
        self.setup.add(setup_ms, n_tokens)

    def draft_costs(self, n_sequences: int, context_tokens: int) -> StepWindow | None:
        """The steps with drafts of this bucket; None before there are enough."""
        bucket = self._bucket(n_sequences, context_tokens)
        window = bucket.window if bucket.on else bucket.trial
        return window if len(window) >= self.limits.least_steps else None

    # ---- trials

    def _mode(self, bucket: _Bucket) -> DraftMode:
        if bucket.on:
            return DraftMode.FEATURES if bucket.has_plain_trial else DraftMode.ON
        if self._trial in (_TrialPhase.SKIPPED, _TrialPhase.DRAFTS) and self._is_tried(bucket):
            return DraftMode.ON
        keeps_contexts = self._trial is not _TrialPhase.NONE or self._kept_steps > 0
        return DraftMode.FEATURES if keeps_contexts else DraftMode.OFF

    def _is_tried(self, bucket: _Bucket) -> bool:
        """Whether it takes part in the trial of drafts: its plain steps are known, and its pause is over."""
        if self._trial is _TrialPhase.NONE:
            return False
        is_known = len(bucket.window) >= self.limits.baseline_steps
        return is_known and bucket.settled_ms >= bucket.due_ms

    def _is_due(self, bucket: _Bucket) -> bool:
        is_time = bucket.settled_ms >= bucket.due_ms
        if not is_time and not bucket.on:
            return False
        if self.is_forced or bucket.has_plain_trial or len(bucket.window) < self.limits.baseline_steps:
            return False
        return is_time or self._is_slower(bucket) if bucket.on else self._trial is _TrialPhase.NONE

    def _is_slower(self, bucket: _Bucket) -> bool:
        """Whether drafts now cost more than steps without them did; looked at once in a while."""
        if not bucket.settled_steps or bucket.settled_steps % self.limits.checked_steps:
            return False
        if bucket.other_ms is None:
            return bucket.window.is_full
        own_ms = (bucket.window.cost_ms + self._setup(bucket)) * (1 - self.limits.margin)
        is_known = bucket.window.is_full or self._is_clear(bucket, len(bucket.window), bucket.other_ms)
        return is_known and own_ms > bucket.other_ms

    def _begin(self, bucket: _Bucket) -> None:
        if bucket.on:
            bucket.trial.clear()
            bucket.has_plain_trial, bucket.plain_ms, bucket.plain_tokens = True, 0.0, 0.0
            return
        self._excess_ms = 0.0
        self._enter(_TrialPhase.GATHER)

    def _enter(self, trial: _TrialPhase) -> None:
        self._trial, self._stage_steps = trial, 0
        if trial is not _TrialPhase.NONE:
            for bucket in self._closed():
                bucket.trial.clear()

    def _has_gathered(self, is_whole: bool) -> bool:
        enough = self.limits.feature_steps if is_whole else self.limits.gather_steps
        return self._stage_steps >= enough

    def _measure_features(self) -> None:
        for bucket in self._closed():
            if len(bucket.trial) >= self.limits.least_steps:
                ratio = bucket.trial.median_ms / max(bucket.window.median_ms, 1e-9)
                weight = 0.3 if self._knows_features else 1.0
                bounded = min(max(ratio, 1.0), self.limits.most_feature_factor)
                self.feature_factor += weight * (bounded - self.feature_factor)
                self._knows_features = True

    def _advance(self, bucket: _Bucket, *, has_drafts: bool) -> None:
        """A step of this bucket was recorded."""
        if self._trial is _TrialPhase.DRAFTS:
            self._stage_steps += 1
            is_decided = self._is_tried(bucket) and self._is_decided(bucket)
            if is_decided or self._stage_steps >= self.limits.absent_steps:
                self._end()
        elif not bucket.on:  # one with drafts says nothing of contexts that are taken in for the trial
            self._stage_steps += 1
            is_skipped = has_drafts or self._stage_steps >= self.limits.skipped_steps
            if self._trial is _TrialPhase.SKIPPED and is_skipped:
                self._enter(_TrialPhase.DRAFTS)

    def _is_decided(self, bucket: _Bucket) -> bool:
        """Whether the trial has enough steps: fewer where the other way clearly loses.

        Where it wins, more steps cost nothing, and show whether it wins only for a moment.
        """
        n_steps, other_ms = len(bucket.trial), bucket.trial.cost_ms
        if n_steps < self.limits.least_steps:
            return False
        if other_ms < bucket.window.cost_ms:
            return n_steps >= self.limits.winning_steps
        return n_steps >= self.limits.trial_steps or self._is_clear(bucket, n_steps, other_ms)

    def _is_clear(self, bucket: _Bucket, n_steps: int, other_ms: float) -> bool:
        """Whether the ways differ by more than their noise, the shorter one known from so many steps.

        How many drafts of a sequence and step are right varies by about as much as their number.
        """
        gap = abs(math.log(max(other_ms, 1e-9) / max(bucket.window.cost_ms, 1e-9)))
        return gap > self.limits.clear_gap / math.sqrt(n_steps * bucket.n_sequences)

    def _end(self) -> None:
        """The trial of drafts has ended. Buckets with too few steps follow the nearest one that is judged."""
        closed, excess_ms = self._closed(), max(self._excess_ms, 0.0)
        tried = [bucket for bucket in closed if self._is_tried(bucket)]
        self._enter(_TrialPhase.NONE)
        judged = {b.key: b for b in tried if len(b.trial) >= self.limits.least_steps}
        for bucket in judged.values():
            self._judge(bucket, bucket.trial.cost_ms + self._setup(bucket), excess_ms)
        for bucket in closed if judged else []:
            if bucket.key not in judged:
                self._follow(bucket, judged[min(judged, key=lambda key: _distance(bucket.key, key))])
        for bucket in tried if not judged else []:
            bucket.settle(self._pause_ms(excess_ms, self.limits.trial_share))

    def _pause_ms(self, excess_ms: float, share: float) -> float:
        return min(excess_ms / share, self.limits.longest_pause_ms)

    def _follow(self, bucket: _Bucket, nearest: _Bucket) -> None:
        is_known = len(bucket.window) >= self.limits.baseline_steps
        if nearest.on and bucket.other_ms is None:
            bucket.other_ms = bucket.window.cost_ms if is_known else None
            bucket.switch()
            bucket.share = nearest.share
            bucket.settle(nearest.due_ms)
        elif not nearest.on and (is_known or bucket.key[0] >= nearest.key[0]):
            # Its own pause may be longer: a cheap trial of a small batch says little of a large one.
            bucket.settle(max(nearest.due_ms, bucket.due_ms - bucket.settled_ms))

    def _record_plain(self, bucket: _Bucket, elapsed_ms: float, tokens: float) -> None:
        bucket.plain_ms += elapsed_ms
        bucket.plain_tokens += tokens
        bucket.trial.add(elapsed_ms, tokens, 0)
        if self._is_decided(bucket):
            bucket.has_plain_trial = False
            own_ms = bucket.window.cost_ms + self._setup(bucket)
            excess_ms = max(bucket.plain_ms - bucket.plain_tokens * own_ms, 0.0)
            self._judge(bucket, bucket.trial.cost_ms / self.feature_factor, excess_ms)

    def _judge(self, bucket: _Bucket, other_ms: float, excess_ms: float) -> None:
        """Choose the cheaper way. A token costs `other_ms` the other way; its trial cost `excess_ms` more."""
        own_ms = bucket.window.cost_ms + (self._setup(bucket) if bucket.on else 0.0)
        if other_ms < own_ms * (1 - self.limits.margin):
            bucket.switch()
            bucket.share = self.limits.first_share
            # A trial of the way that is left now costs about what this one has saved.
            excess_ms = max(own_ms - other_ms, 0.0) * self.limits.trial_steps
            own_ms, other_ms = other_ms, own_ms
        bucket.other_ms = other_ms
        share = self.limits.trial_share
        if bucket.on:
            share, bucket.share = bucket.share, max(bucket.share / 2, share)
        bucket.settle(self._pause_ms(excess_ms, share))

    def _setup(self, bucket: _Bucket) -> float:
        """Share of a token in the setups of all sequences of the batch: each one delays the others."""
        return bucket.n_sequences * self.setup.ms_per_token

    def _closed(self) -> list[_Bucket]:
        return [bucket for bucket in self._buckets.values() if not bucket.on]

    def _bucket(self, n_sequences: int, context_tokens: int) -> _Bucket:
        """A step asks twice for one bucket."""
        last = self._last
        if last is None or last[0] != n_sequences or last[1] != context_tokens:
            self._last = last = n_sequences, context_tokens, self._find(n_sequences, context_tokens)
        return last[2]

    def _find(self, n_sequences: int, context_tokens: int) -> _Bucket:
        key = n_sequences.bit_length(), max(context_tokens.bit_length() - 9, 0) // 2
        bucket = self._buckets.get(key)
        if bucket is None:
            steps = self.limits.window_steps
            bucket = _Bucket(key, n_sequences, StepWindow(steps), StepWindow(steps), on=self.is_forced)
            if self._buckets:
                nearest_key = min(self._buckets, key=lambda other: _distance(key, other))
                nearest = self._buckets[nearest_key]
                bucket.on, bucket.share = nearest.on, nearest.share
                # Drafts that lost there wait here as long: else each new size of a batch begins with a trial.
                # In a smaller batch they may pay, because its steps have room for more rows.
                if not nearest.on and key[0] >= nearest_key[0]:
                    bucket.due_ms = nearest.due_ms
            self._buckets[key] = bucket
        return bucket


def _distance(key: tuple[int, int], other: tuple[int, int]) -> int:
    return 2 * abs(key[0] - other[0]) + abs(key[1] - other[1])

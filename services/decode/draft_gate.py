"""Whether drafts pay here and now: measured, not assumed. Pure; times are given.

A draft saves steps and costs a wait and a wider step. Which of the two is more depends on model, machine,
text and batch, so both ways are timed: the cost of a way is the time in which one sequence advances by one
token. The cheaper way is kept for a while, then the other one is tried again for a few steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GateLimits:
    """Counts of steps. `kept_steps` doubles up to `most_kept_steps` each time the verdict stays the same."""

    tried_steps: int = 16
    # The first steps after a change are not timed: the drafter first receives the rows that it missed.
    skipped_steps: int = 2
    kept_steps: int = 256
    most_kept_steps: int = 4096
    # The other way must be better by this share; noise alone changes nothing.
    margin: float = 0.05


@dataclass(slots=True)
class _Way:
    """One way of stepping: what its last trial cost."""

    elapsed_ms: float = 0.0
    advanced_tokens: float = 0.0

    @property
    def cost_ms(self) -> float:
        return self.elapsed_ms / self.advanced_tokens if self.advanced_tokens else float("inf")


@dataclass(slots=True)
class _Bucket:
    """Batches of about one size."""

    drafts: bool = True
    ways: dict[bool, _Way] = field(default_factory=lambda: {True: _Way(), False: _Way()})
    trying: bool = True
    steps_left: int = 0
    kept_steps: int = 0
    best: bool | None = None


@dataclass(slots=True)
class DraftGate:
    """One for a decode worker. Batches of 1, 2-3, 4-7, ... sequences are judged apart."""

    limits: GateLimits = field(default_factory=GateLimits)
    _buckets: dict[int, _Bucket] = field(default_factory=dict)

    def open(self, n_sequences: int) -> bool:
        """Whether the next step of so many sequences should use drafts."""
        return self._bucket(n_sequences).drafts

    def record(self, n_sequences: int, *, drafts: bool, elapsed_ms: float, n_tokens: int) -> None:
        """A step of `n_sequences` took `elapsed_ms`, its wait for drafts included, and gave `n_tokens`.

        A step that ran otherwise than `open` said (the drafter was gone) is not counted.
        """
        if n_sequences < 1 or n_tokens < 1:
            return
        bucket = self._bucket(n_sequences)
        if drafts != bucket.drafts:
            return
        bucket.steps_left -= 1
        if bucket.trying and bucket.steps_left < self.limits.tried_steps:
            way = bucket.ways[drafts]
            way.elapsed_ms += elapsed_ms
            way.advanced_tokens += n_tokens / n_sequences
        if bucket.steps_left <= 0:
            self._next(bucket)

    def _bucket(self, n_sequences: int) -> _Bucket:
        key = n_sequences.bit_length()
        if key not in self._buckets:
            self._buckets[key] = bucket = _Bucket()
            self._try(bucket, drafts=True)
        return self._buckets[key]

    def _next(self, bucket: _Bucket) -> None:
        if not bucket.trying:
            bucket.ways = {True: _Way(), False: _Way()}
        for drafts in (bucket.drafts, not bucket.drafts):
            if not bucket.ways[drafts].advanced_tokens:
                self._try(bucket, drafts=drafts)
                return
        self._judge(bucket)

    def _try(self, bucket: _Bucket, *, drafts: bool) -> None:
        bucket.drafts, bucket.trying = drafts, True
        bucket.steps_left = self.limits.skipped_steps + self.limits.tried_steps

    def _judge(self, bucket: _Bucket) -> None:
        cost = {way: bucket.ways[way].cost_ms for way in (True, False)}
        best = bucket.best
        if best is None:
            best = cost[True] <= cost[False]
        elif cost[not best] < cost[best] * (1 - self.limits.margin):
            best = not best
        kept = self.limits.kept_steps
        if best == bucket.best:
            kept = min(bucket.kept_steps * 2, self.limits.most_kept_steps)
        bucket.best, bucket.kept_steps = best, kept
        bucket.drafts, bucket.trying, bucket.steps_left = best, False, kept

"""The buckets of decode steps: steps of one bucket have the same shapes, and share a graph. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from libs.engine.step.batch import ForwardBatch
from libs.engine.step.padded_rows import padded_rows

# Verify rows beyond this cost more than their launches, so their steps need no graph.
MAX_VERIFY_ROWS = 256


@dataclass(frozen=True, slots=True)
class StepBucket:
    """Room for `n_sequences` of at most `rows_each` rows: one, or a verified draft's."""

    n_sequences: int
    rows_each: int
    wants_features: bool = False

    @property
    def n_rows(self) -> int:
        return self.n_sequences * self.rows_each

    @property
    def shape(self) -> StepBucket:
        """The bucket with the same inputs."""
        return replace(self, wants_features=False)


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """max_rows_each: 1, or more where drafts are verified on fixed buffers, too.

    has_features: steps with drafts compute features, and those without compute them or not.
    """

    max_batch: int
    max_rows_each: int = 1
    has_features: bool = False

    @property
    def max_rows(self) -> int:
        """The rows of the largest bucket."""
        return max(bucket.n_rows for bucket in planned_buckets(self))


def bucket_sizes(max_batch: int) -> Iterator[int]:
    """Powers of two below `max_batch`, then `max_batch`."""
    size = 1
    while size < max_batch:
        yield size
        size *= 2
    yield max_batch


def bucket_rows(max_rows_each: int) -> Iterator[int]:
    """The counts of `padded_rows` below `max_rows_each`, then `max_rows_each`."""
    n_rows = 1
    while n_rows < max_rows_each:
        yield n_rows
        n_rows = padded_rows(n_rows + 1)
    yield max_rows_each


def planned_buckets(limits: BucketLimits) -> list[StepBucket]:
    """All buckets that `choose_bucket` may give, those with the most rows first."""
    buckets = [
        StepBucket(n_sequences, rows_each, wants_features)
        for rows_each in bucket_rows(limits.max_rows_each)
        for n_sequences in bucket_sizes(limits.max_batch)
        for wants_features in (False, True)
        if _is_planned(StepBucket(n_sequences, rows_each, wants_features), limits)
    ]
    return sorted(buckets, key=lambda bucket: bucket.n_rows, reverse=True)


def choose_bucket(batch: ForwardBatch, limits: BucketLimits) -> StepBucket | None:
    """The smallest bucket with room for the batch.

    None for a batch with a row that is not sampled, with scored rows, or beyond the limits, and for features
    that no bucket has.
    """
    if batch.want_features and not limits.has_features:
        return None
    if batch.n_sequences > limits.max_batch or len(batch.scored_rows):
        return None
    if len(batch.logit_rows) != batch.n_rows:
        return None
    rows_each = int(np.diff(batch.query_start).max())
    if rows_each > limits.max_rows_each:
        return None
    bucket = StepBucket(
        next(size for size in bucket_sizes(limits.max_batch) if size >= batch.n_sequences),
        min(padded_rows(rows_each), limits.max_rows_each),
        batch.want_features,
    )
    return bucket if _is_planned(bucket, limits) else None


def _is_planned(bucket: StepBucket, limits: BucketLimits) -> bool:
    if bucket.rows_each == 1:
        return limits.has_features or not bucket.wants_features
    return bucket.n_rows <= MAX_VERIFY_ROWS and bucket.wants_features is limits.has_features

"""The buckets of decode steps: steps of one bucket have the same shapes, and share a graph. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from libs.engine.step.batch import Batch

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


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """max_rows_each: 1, or more where drafts are verified on fixed buffers, too."""

    max_batch: int
    max_rows_each: int = 1

    @property
    def max_rows(self) -> int:
        """The rows of the largest bucket."""
        return max(self.max_batch, min(MAX_VERIFY_ROWS, self.max_batch * self.max_rows_each))


def bucket_sizes(max_batch: int) -> Iterator[int]:
    """Powers of two below `max_batch`, then `max_batch`."""
    size = 1
    while size < max_batch:
        yield size
        size *= 2
    yield max_batch


def choose_bucket(batch: Batch, limits: BucketLimits) -> StepBucket | None:
    """The smallest bucket with room for the batch.

    None for a batch with a row that is not sampled, with scored rows, or beyond the limits.
    """
    if batch.n_sequences > limits.max_batch or len(batch.scored_rows):
        return None
    if len(batch.logit_rows) != batch.n_rows:
        return None
    rows_each = int(np.diff(batch.query_start).max())
    n_sequences = next(size for size in bucket_sizes(limits.max_batch) if size >= batch.n_sequences)
    bucket = StepBucket(n_sequences, rows_each, batch.want_features)
    fits = rows_each <= limits.max_rows_each and bucket.n_rows <= limits.max_rows
    return bucket if fits else None

"""The buckets of decode steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.graphs.buckets import BucketLimits, bucket_sizes, choose_bucket
from libs.engine.step.batch import Batch


def sampled_batch(rows: list[int]) -> Batch:
    n_rows = sum(rows)
    return Batch(
        token_ids=np.zeros(n_rows, np.int32),
        positions=np.concatenate([np.arange(n) for n in rows]).astype(np.int32),
        query_start=np.concatenate(([0], np.cumsum(rows))).astype(np.int32),
        context_len=np.array(rows, np.int32),
        page_table=np.zeros((len(rows), 1), np.int32),
        logit_rows=np.arange(n_rows, dtype=np.int32),
    )


def test_sizes_double_up_to_the_batch() -> None:
    assert list(bucket_sizes(1)) == [1]
    assert list(bucket_sizes(8)) == [1, 2, 4, 8]
    assert list(bucket_sizes(48)) == [1, 2, 4, 8, 16, 32, 48]


@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=70),
    max_batch=st.integers(1, 64),
    max_rows_each=st.integers(1, 9),
)
def test_a_bucket_has_room_and_wastes_less_than_half(
    rows: list[int], max_batch: int, max_rows_each: int
) -> None:
    limits = BucketLimits(max_batch, max_rows_each)
    bucket = choose_bucket(sampled_batch(rows), limits)
    if len(rows) > max_batch or max(rows) > max_rows_each:
        assert bucket is None
        return
    if bucket is None:
        assert max(rows) > 1  # a batch without drafts always has one
        return
    assert bucket.rows_each == max(rows)
    assert len(rows) <= bucket.n_sequences <= max_batch
    assert bucket.n_sequences < 2 * len(rows)
    assert bucket.n_rows <= limits.max_rows


@pytest.mark.parametrize("n_rows", [1, 3])
def test_rows_that_are_not_sampled_have_no_bucket(n_rows: int) -> None:
    batch = sampled_batch([n_rows, 1])
    limits = BucketLimits(4, 3)
    assert choose_bucket(batch, limits) is not None
    assert choose_bucket(replace(batch, logit_rows=batch.logit_rows[1:]), limits) is None

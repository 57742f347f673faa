"""The buckets of decode steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.graphs.buckets import (
    BucketLimits,
    bucket_rows,
    bucket_sizes,
    choose_bucket,
    planned_buckets,
)
from libs.engine.kernels.gpu.kv_splits import count_splits
from libs.engine.step.batch import ForwardBatch


def sampled_batch(rows: list[int]) -> ForwardBatch:
    n_rows = sum(rows)
    return ForwardBatch(
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


def test_rows_grow_by_half_up_to_the_longest_draft() -> None:
    assert list(bucket_rows(1)) == [1]
    assert list(bucket_rows(5)) == [1, 2, 3, 4, 5]
    assert list(bucket_rows(9)) == [1, 2, 3, 4, 6, 9]
    assert list(bucket_rows(17)) == [1, 2, 3, 4, 6, 9, 13, 17]


@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=70),
    max_batch=st.integers(1, 64),
    max_rows_each=st.integers(1, 9),
    has_features=st.booleans(),
    wants_features=st.booleans(),
)
def test_a_bucket_has_room_wastes_little_and_is_planned(
    rows: list[int], max_batch: int, max_rows_each: int, has_features: bool, wants_features: bool
) -> None:
    """A step never meets a bucket that was not captured at the start."""
    limits = BucketLimits(max_batch, max_rows_each, has_features)
    bucket = choose_bucket(replace(sampled_batch(rows), want_features=wants_features), limits)
    if len(rows) > max_batch or max(rows) > max_rows_each or wants_features > has_features:
        assert bucket is None
        return
    if bucket is None:
        assert max(rows) > 1  # a batch without drafts always has one
        return
    assert bucket in planned_buckets(limits)
    assert bucket.wants_features is wants_features
    assert max(rows) <= bucket.rows_each <= min(1.5 * max(rows), max_rows_each)
    assert len(rows) <= bucket.n_sequences <= max_batch
    assert bucket.n_sequences < 2 * len(rows)
    assert bucket.n_rows <= limits.max_rows


@given(max_batch=st.integers(1, 300), max_rows_each=st.integers(1, 20), has_features=st.booleans())
def test_the_plan_begins_with_the_largest_bucket_and_names_each_once(
    max_batch: int, max_rows_each: int, has_features: bool
) -> None:
    buckets = planned_buckets(BucketLimits(max_batch, max_rows_each, has_features))
    n_rows = [bucket.n_rows for bucket in buckets]
    assert n_rows == sorted(n_rows, reverse=True)
    assert n_rows[0] >= max_batch
    assert len(set(buckets)) == len(buckets) <= 120


def test_without_drafts_the_largest_bucket_is_the_batch() -> None:
    assert BucketLimits(64).max_rows == 64
    assert BucketLimits(64, 9, has_features=True).max_rows == 256
    assert BucketLimits(300, 9).max_rows == 300


@given(
    n_sequences=st.integers(1, 64),
    n_rows=st.integers(1, 17),
    max_rows_each=st.integers(1, 17),
    n_heads=st.sampled_from([2, 16, 64, 128]),
)
def test_padding_changes_no_split(n_sequences: int, n_rows: int, max_rows_each: int, n_heads: int) -> None:
    """A bucket cuts the KV as a step of the same sequences without padding does."""
    bucket = choose_bucket(sampled_batch([n_rows] * n_sequences), BucketLimits(64, max_rows_each))
    if bucket is not None:
        wanted = count_splits(n_sequences, n_rows, n_heads, 132)
        assert count_splits(bucket.n_sequences, bucket.rows_each, n_heads, 132) == wanted


@pytest.mark.parametrize("n_rows", [1, 3])
def test_rows_that_are_not_sampled_have_no_bucket(n_rows: int) -> None:
    batch = sampled_batch([n_rows, 1])
    limits = BucketLimits(4, 3)
    assert choose_bucket(batch, limits) is not None
    assert choose_bucket(replace(batch, logit_rows=batch.logit_rows[1:]), limits) is None

"""Parts of a batch: every row once, in order, with the context that it has by then."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.parallel.split import (
    MICRO_BATCH_ROWS,
    count_micro_batches,
    slice_rows,
    split_rows,
    split_sequences,
)
from libs.engine.step.batch import ForwardBatch

BLOCK_TOKENS = 4
# (rows, tokens of context before them) of each sequence.
SEQUENCES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=6)


def make_batch(sequences: list[tuple[int, int]]) -> ForwardBatch:
    rows = np.array([n for n, _ in sequences], np.int32)
    context_len = np.array([sum(pair) for pair in sequences], np.int32)
    query_start = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    positions = np.concatenate([np.arange(before, before + n) for n, before in sequences]).astype(np.int32)
    n_blocks = int(-(-context_len.max() // BLOCK_TOKENS))
    return ForwardBatch(
        token_ids=np.arange(query_start[-1], dtype=np.int32),
        positions=positions,
        query_start=query_start,
        context_len=context_len,
        page_table=np.arange(len(rows) * n_blocks, dtype=np.int32).reshape(len(rows), n_blocks),
        logit_rows=np.arange(query_start[-1], dtype=np.int32),
    )


def rows_of(batch: ForwardBatch) -> list[tuple[int, int, int]]:
    """Token, position and first page of each row; checks the invariants of a batch."""
    found = []
    for s in range(batch.n_sequences):
        span = slice(int(batch.query_start[s]), int(batch.query_start[s + 1]))
        positions = batch.positions[span]
        assert len(positions) and positions[-1] == batch.context_len[s] - 1
        assert np.array_equal(positions, np.arange(positions[0], positions[-1] + 1))
        found += [
            (int(t), int(p), int(batch.page_table[s, 0]))
            for t, p in zip(batch.token_ids[span], positions, strict=True)
        ]
    assert len(found) == batch.n_rows
    return found


@given(sequences=SEQUENCES, n_parts=st.integers(1, 8))
def test_row_parts_are_the_batch_in_order(sequences: list[tuple[int, int]], n_parts: int) -> None:
    batch = make_batch(sequences)
    parts = split_rows(batch, n_parts)
    assert [row for part in parts for row in rows_of(part)] == rows_of(batch)
    sizes = [part.n_rows for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(sequences=SEQUENCES, n_parts=st.integers(1, 8))
def test_sequence_parts_are_whole_sequences(sequences: list[tuple[int, int]], n_parts: int) -> None:
    batch = make_batch(sequences)
    spans = split_sequences(batch, n_parts)
    assert [spans[0].start, *(s.stop for s in spans)] == [*(s.start for s in spans), batch.n_rows]
    assert {span.start for span in spans} <= set(batch.query_start.tolist())
    parts = [part for span in spans if (part := slice_rows(batch, span)) is not None]
    assert [row for part in parts for row in rows_of(part)] == rows_of(batch)
    assert sum(part.n_sequences for part in parts) == batch.n_sequences


def test_equal_sequences_are_shared_evenly() -> None:
    spans = split_sequences(make_batch([(1, 100)] * 8), 4)
    assert [span.stop - span.start for span in spans] == [2, 2, 2, 2]


def test_decode_steps_are_not_cut_into_micro_batches() -> None:
    assert count_micro_batches(MICRO_BATCH_ROWS, 4) == 1
    assert count_micro_batches(1, 4) == 1
    assert count_micro_batches(10_000, 1) == 1
    assert count_micro_batches(8 * MICRO_BATCH_ROWS, 4) == 8
    assert count_micro_batches(100 * MICRO_BATCH_ROWS, 4) == 16

"""Parts of a batch: micro-batches of a pipeline, and the sequences of each part of data parallelism. Pure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from libs.engine.step.batch import ForwardBatch

# A stage that multiplies fewer rows than this reads its weights as long as it computes.
MICRO_BATCH_ROWS = 64
_ROW_COST_TOKENS = 1024  # a row's projections and experts, in units of context tokens that it attends to


def count_micro_batches(n_rows: int, n_stages: int) -> int:
    """How many micro-batches a pipeline runs a batch in: one where smaller ones would not be faster."""
    return 1 if n_stages == 1 else max(1, min(4 * n_stages, n_rows // MICRO_BATCH_ROWS))


def split_rows(batch: ForwardBatch, n_parts: int) -> list[ForwardBatch]:
    """Consecutive rows of the batch in parts of about equal size; at most one part a row.

    The parts must run in order, as a sequence may continue in the next one. `logit_rows` of the parts are
    empty: logits are taken of the whole batch.
    """
    n_parts = min(n_parts, batch.n_rows)
    edges = [batch.n_rows * part // n_parts for part in range(n_parts + 1)]
    return [_rows(batch, *edge) for edge in pairwise(edges)]


def split_sequences(batch: ForwardBatch, n_parts: int) -> list[slice]:
    """The rows of each part: whole sequences, in order, of about equal cost. A part may be empty."""
    rows = np.diff(batch.query_start).astype(np.float64)
    cost = np.cumsum(rows * (batch.context_len + _ROW_COST_TOKENS))
    middle = cost - np.diff(cost, prepend=0.0) / 2
    part_of = np.minimum((middle * n_parts / cost[-1]).astype(np.int64), n_parts - 1)
    edges = batch.query_start[np.searchsorted(part_of, np.arange(n_parts + 1))]
    return [slice(int(begin), int(end)) for begin, end in pairwise(edges)]


def slice_rows(batch: ForwardBatch, rows: slice) -> ForwardBatch | None:
    """The batch of some rows, or None for no rows."""
    return _rows(batch, rows.start, rows.stop) if rows.stop > rows.start else None


def _rows(batch: ForwardBatch, begin: int, end: int) -> ForwardBatch:
    starts = batch.query_start
    first = int(np.searchsorted(starts, begin, side="right")) - 1
    last = int(np.searchsorted(starts, end, side="left"))  # sequences [first, last)
    clipped = np.clip(starts[first : last + 1], begin, end).astype(np.int32)
    # Rows of the last sequence behind the part are not in its context yet.
    context_len = batch.context_len[first:last].copy()
    context_len[-1] -= int(starts[last]) - end
    return ForwardBatch(
        token_ids=batch.token_ids[begin:end],
        positions=batch.positions[begin:end],
        query_start=clipped - np.int32(begin),
        context_len=context_len,
        page_table=batch.page_table[first:last],
        logit_rows=np.empty(0, np.int32),
        want_features=batch.want_features,
    )

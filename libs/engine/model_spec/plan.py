"""The facts about the batch that every layer of one forward pass needs, worked out and checked once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from libs.engine.kv.cache import PagedLatentCache
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.kv_share import KvShare
from libs.engine.model_spec.rope import Rope
from libs.engine.step.batch import ForwardBatch, Int32Array
from slipstream.errors import InvalidArgument

ALL_SLOTS = KvShare()


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """cos_sin [T, 2, rope/2]; page_of_row and offset_of_row [T]: the cache slot each row writes.

    Each sequence is in `absorbed` or `expanded`, the form of attention with the lower cost for it.
    `query_start` and `page_table` are those of the batch, as contiguous int32.

    Attention is over the slots of `share`: `context_len` [S] counts those of each context, `visible` [T] the
    leading ones of them that each row attends to. Either may be 0 for a part of the slots. The page of a row
    whose slot is not in the share is -1.
    """

    n_rows: int
    cos_sin: torch.Tensor
    page_of_row: Int32Array
    offset_of_row: Int32Array
    query_start: Int32Array
    context_len: Int32Array
    visible: Int32Array
    page_table: Int32Array
    absorbed: Int32Array
    expanded: Int32Array
    cache: PagedLatentCache
    share: KvShare

    def rows_of(self, sequence: int) -> slice:
        return slice(int(self.query_start[sequence]), int(self.query_start[sequence + 1]))


def plan_batch(
    batch: ForwardBatch, config: ModelConfig, rope: Rope, cache: PagedLatentCache, share: KvShare = ALL_SLOTS
) -> BatchPlan:
    """Plan a batch. Raises InvalidArgument naming the inconsistent field of the batch."""
    block_tokens = cache.shape.block_tokens
    page_table = np.ascontiguousarray(batch.page_table, dtype=np.int32)
    positions = np.ascontiguousarray(batch.positions, dtype=np.int32)
    query_start = np.ascontiguousarray(batch.query_start, dtype=np.int32)
    context_len = np.ascontiguousarray(batch.context_len, dtype=np.int32)
    _check(batch, config, cache)
    rows_per_sequence = query_start[1:] - query_start[:-1]
    sequences = np.arange(batch.n_sequences, dtype=np.int32)
    is_expanded = rows_per_sequence > absorbed_row_limit(config)
    block_of_row, offset_of_row = np.divmod(positions, np.int32(block_tokens))
    page_of_row = page_table[sequences.repeat(rows_per_sequence), block_of_row]
    return BatchPlan(
        n_rows=batch.n_rows,
        cos_sin=rope.cos_sin(torch.from_numpy(positions)),
        page_of_row=share.local_pages(page_of_row, offset_of_row, block_tokens),
        offset_of_row=offset_of_row,
        query_start=query_start,
        context_len=share.count(context_len, block_tokens),
        visible=share.count(positions + 1, block_tokens),
        page_table=page_table,
        absorbed=sequences[~is_expanded],
        expanded=sequences[is_expanded],
        cache=cache,
        share=share,
    )


def absorbed_row_limit(config: ModelConfig) -> int:
    """The largest number of query rows of a sequence for which the absorbed form is cheaper.

    Per query row, context token and head the absorbed form needs 2 * kv_lora + rope multiplications, the
    expanded one nope + rope + v. The expansion itself needs kv_lora * (nope + v) once per context token.
    """
    expanded = config.qk_nope_head_dim + config.v_head_dim
    saved = 2 * config.kv_lora_rank - expanded
    if saved <= 0:
        return int(np.iinfo(np.int32).max)
    return config.kv_lora_rank * expanded // saved


def long_prompt_rows(config: ModelConfig) -> int:
    """Rows of a step for which expanding the prefix costs at most a quarter of attending to it.

    Per context token and head the expansion needs kv_lora * (nope + v) multiplications, and each row
    nope + rope + v. K2.5 needs 1,640 rows, other shapes less than the usual step of 512.
    """
    expansion = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    return -(-4 * expansion // (config.qk_head_dim + config.v_head_dim))


def _check(batch: ForwardBatch, config: ModelConfig, cache: PagedLatentCache) -> None:
    rows = batch.query_start[1:] - batch.query_start[:-1]
    lengths: npt.NDArray[np.int32] = batch.context_len
    if batch.n_rows < 1 or batch.n_sequences < 1:
        raise InvalidArgument("batch.token_ids", "a batch has at least one row")
    if batch.query_start[0] != 0 or batch.query_start[-1] != batch.n_rows or rows.min() < 1:
        raise InvalidArgument("batch.query_start", "must divide all rows, with at least one per sequence")
    first = (lengths - rows - batch.query_start[:-1]).repeat(rows)
    expected = first + np.arange(batch.n_rows)
    if (lengths < rows).any() or len(batch.positions) != len(expected) or (batch.positions != expected).any():
        raise InvalidArgument("batch.positions", "must be the last positions of each context, ascending")
    if batch.token_ids.min() < 0 or batch.token_ids.max() >= config.vocab_size:
        raise InvalidArgument("batch.token_ids", f"must be within 0..{config.vocab_size - 1}")
    blocks = -(-lengths // cache.shape.block_tokens)
    if batch.page_table.shape[0] != batch.n_sequences or blocks.max() > batch.page_table.shape[1]:
        raise InvalidArgument("batch.page_table", "must have a page for every block of every context")
    used = batch.page_table[np.arange(batch.page_table.shape[1]) < blocks[:, None]]
    if used.min() < 0 or used.max() >= cache.shape.n_pages:
        raise InvalidArgument("batch.page_table", f"pages must be within 0..{cache.shape.n_pages - 1}")
    for name, found, limit in (
        ("logit_rows", batch.logit_rows, batch.n_rows),
        ("scored_rows", batch.scored_rows, batch.n_rows),
        ("scored_tokens", batch.scored_tokens, config.vocab_size),
    ):
        if found.size and (found.min() < 0 or found.max() >= limit):
            raise InvalidArgument(f"batch.{name}", f"must be within 0..{limit - 1}")

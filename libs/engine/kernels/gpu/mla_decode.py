"""Attention over paged latents in the absorbed form: KV split over programs, then a merge of the splits.

The rows of a sequence and their heads form one matrix of query vectors, because all of them read the same
latents. A latent is read once: the whole row is the key, its first `kv_lora_rank` values are the value.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from libs.engine.kernels.gpu.device_plan import DevicePlan
from libs.engine.kernels.gpu.kv_splits import BLOCK_TOKENS, KvSplits

_LOG2_E = math.log2(math.e)
_SHARED_BYTES = 227 << 10  # of a program on sm_90
_LEAST_TILE = 16  # of a matrix unit


@triton.jit
def _split_program(
    q_latent,
    q_rope,
    layer_pages,
    page_table,
    query_start,
    context_len,
    sequences,
    split_sizes,
    mixed,
    lse,
    rope_row_stride,
    rope_head_stride,
    page_stride,
    table_stride,
    table_block_stride,
    split_stride,
    base_2_scale,
    block_tokens,
    N_HEADS: tl.constexpr,
    LORA: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_LORA: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    sequence = tl.load(sequences + tl.program_id(0))
    first_row = tl.load(query_start + sequence)
    n_rows = tl.load(query_start + sequence + 1) - first_row
    context = tl.load(context_len + sequence)
    split_tokens = tl.load(split_sizes + sequence)
    begin = tl.program_id(2) * split_tokens
    first = tl.program_id(1) * BLOCK_M
    if (begin < context) & (first < n_rows * N_HEADS):
        vector = first + tl.arange(0, BLOCK_M)
        live = vector < n_rows * N_HEADS
        row = vector // N_HEADS
        latent_column = tl.arange(0, BLOCK_LORA)
        rope_column = tl.arange(0, BLOCK_ROPE)
        is_latent = latent_column < LORA
        is_rope = rope_column < ROPE
        at = (first_row * N_HEADS + vector).to(tl.int64)
        q_l = tl.load(
            q_latent + at[:, None] * LORA + latent_column[None, :],
            mask=live[:, None] & is_latent[None, :],
            other=0.0,
        )
        rope_at = (first_row + row).to(tl.int64) * rope_row_stride + (vector % N_HEADS) * rope_head_stride
        q_r = tl.load(
            q_rope + rope_at[:, None] + rope_column[None, :],
            mask=live[:, None] & is_rope[None, :],
            other=0.0,
        )
        visible = context - n_rows + row + 1
        end = tl.minimum(begin + split_tokens, context)
        largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_LORA), tl.float32)
        latent_at = tl.arange(0, BLOCK_N)[:, None] * (LORA + ROPE) + latent_column[None, :]
        rope_key_at = tl.arange(0, BLOCK_N)[:, None] * (LORA + ROPE) + LORA + rope_column[None, :]
        for start in range(begin, end, BLOCK_N):
            token = start + tl.arange(0, BLOCK_N)
            held = token < end
            # The tokens of a tile are in one page, so that only one address depends on the table.
            block = start // block_tokens
            page = tl.load(page_table + sequence * table_stride + block * table_block_stride)
            tile = layer_pages + page.to(tl.int64) * page_stride + (start % block_tokens) * (LORA + ROPE)
            # What a page holds behind the context may be NaN, which a weight of 0 would not remove.
            key_l = tl.load(tile + latent_at, mask=held[:, None] & is_latent[None, :], other=0.0).to(
                q_l.dtype
            )
            key_r = tl.load(tile + rope_key_at, mask=held[:, None] & is_rope[None, :], other=0.0).to(
                q_r.dtype
            )
            score = tl.dot(q_l, tl.trans(key_l), input_precision="ieee")
            score = tl.dot(q_r, tl.trans(key_r), score, input_precision="ieee")
            score = tl.where(token[None, :] < visible[:, None], score * base_2_scale, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(score, 1))
            # A row may see no token of the first blocks: then its maximum stays -inf.
            offset = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            kept = tl.exp2(largest - offset)
            weight = tl.exp2(score - offset[:, None])
            total = total * kept + tl.sum(weight, 1)
            acc = tl.dot(weight.to(key_l.dtype), key_l, acc * kept[:, None], input_precision="ieee")
            largest = new_largest
        divisor = tl.where(total == 0.0, 1.0, total)
        target = tl.program_id(2).to(tl.int64) * split_stride + at
        tl.store(
            mixed + target[:, None] * LORA + latent_column[None, :],
            (acc / divisor[:, None]).to(mixed.dtype.element_ty),
            mask=live[:, None] & is_latent[None, :],
        )
        tl.store(lse + target, tl.where(total == 0.0, float("-inf"), largest + tl.log2(divisor)), mask=live)


@triton.jit
def _merge_program(
    parts,
    lse,
    splits_of_row,
    mixed,
    split_stride,
    N_HEADS: tl.constexpr,
    LORA: tl.constexpr,
    BLOCK_LORA: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = row * N_HEADS + tl.program_id(1)
    column = tl.arange(0, BLOCK_LORA)
    inside = column < LORA
    # The first split always holds a visible token; the later ones of this row all do.
    n_splits = tl.load(splits_of_row + row)
    largest = tl.load(lse + at)
    total = tl.full((), 1.0, tl.float32)
    acc = tl.load(parts + at * LORA + column, mask=inside, other=0.0)
    for split in range(1, n_splits):
        source = at + split * split_stride
        value = tl.load(lse + source)
        part = tl.load(parts + source * LORA + column, mask=inside, other=0.0)
        new_largest = tl.maximum(largest, value)
        kept = tl.exp2(largest - new_largest)
        weight = tl.exp2(value - new_largest)
        acc = acc * kept + part * weight
        total = total * kept + weight
        largest = new_largest
    tl.store(mixed + at * LORA + column, (acc / total).to(mixed.dtype.element_ty), mask=inside)


def tile_sizes(n_vectors: int, block_tokens: int, row_bytes: int) -> tuple[int, int]:
    """Query vectors and tokens of a tile: powers of two, from 16 vectors on; the tokens divide a page.

    `row_bytes`: of a latent and its rotary key, each padded to a power of two as in a tile.

    Shared memory has the queries of a tile and two tiles of latents. Rows in fp32 as wide as those of
    DeepSeek's models leave room for small tiles only.
    """
    most = BLOCK_TOKENS if 3 * BLOCK_TOKENS * row_bytes <= _SHARED_BYTES else _LEAST_TILE
    vectors = min(max(triton.next_power_of_2(n_vectors), _LEAST_TILE), most)
    return vectors, min(block_tokens & -block_tokens, most)


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    layer_pages: torch.Tensor,
    plan: DevicePlan,
    splits: KvSplits,
    *,
    scale: float,
) -> torch.Tensor:
    """Mix the latents of each absorbed sequence: [A, heads, kv_lora] in the dtype of the queries.

    q_latent [A, heads, kv_lora] is contiguous, q_rope [A, heads, rope] a view with unit stride in its last
    dimension; A are the rows of absorbed sequences alone, because each split has an fp32 result of all of
    them. Rows of no sequence stay undefined.
    """
    n_rows, n_heads, lora = q_latent.shape
    block_tokens = layer_pages.shape[1]
    vectors = splits.most_rows * n_heads
    block_lora = max(triton.next_power_of_2(lora), _LEAST_TILE)
    block_rope = max(triton.next_power_of_2(q_rope.shape[2]), _LEAST_TILE)
    row_bytes = (block_lora + block_rope) * q_latent.element_size()
    block_m, block_n = tile_sizes(vectors, block_tokens, row_bytes)
    mixed = torch.empty_like(q_latent)
    n_splits = splits.n_splits
    parts = mixed if n_splits == 1 else mixed.new_empty(n_splits, *mixed.shape, dtype=torch.float32)
    lse = torch.empty(n_splits, n_rows, n_heads, dtype=torch.float32, device=mixed.device)
    _split_program[(plan.absorbed.shape[0], triton.cdiv(vectors, block_m), n_splits)](
        q_latent,
        q_rope,
        layer_pages,
        plan.page_table,
        plan.query_start,
        plan.context_len,
        plan.absorbed,
        splits.tokens,
        parts,
        lse,
        q_rope.stride(0),
        q_rope.stride(1),
        layer_pages.stride(0),
        plan.page_table.stride(0),
        plan.page_table.stride(1),
        n_rows * n_heads,
        scale * _LOG2_E,
        block_tokens,
        N_HEADS=n_heads,
        LORA=lora,
        ROPE=q_rope.shape[2],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_LORA=block_lora,
        BLOCK_ROPE=block_rope,
        num_warps=8 if block_m == 64 else 4,
        num_stages=2,
    )
    if n_splits > 1:
        _merge_program[(n_rows, n_heads)](
            parts,
            lse,
            splits.of_row,
            mixed,
            n_rows * n_heads,
            N_HEADS=n_heads,
            LORA=lora,
            BLOCK_LORA=block_lora,
        )
    return mixed

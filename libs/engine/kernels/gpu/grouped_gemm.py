"""Products of rows with the weights of their experts, by persistent programs over a list of work.

Weights are the left operand, so that few rows fill a matrix unit: Y^T = W X^T. The bits 0x4300 | u are the
bf16 number 128 + u, and 136 less is the weight u - 8: both are exact. The product of a group is then scaled
in fp32. A scale on the weights instead would round each of them to bf16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from libs.engine.kernels.gpu.expert_weights import ExpertWeights
from libs.engine.kernels.gpu.work_list import WorkList

_INTERPRETED_PROGRAMS = 4
_PROGRAMS_PER_PROCESSOR = 8


@triton.jit
def _int4_tile(
    x, source, live, data, scale, expert, row, rows, cols, n_words, BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr, GROUP: tl.constexpr, NIBBLES: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
    inside = row < rows
    word = tl.arange(0, GROUP)
    weights = data + (expert * rows + row)[:, None] * n_words + word[None, :]
    n_groups = n_words * 8 // GROUP
    scales = scale + expert * n_groups * rows + row
    for block in range(0, n_words // GROUP):
        words = tl.load(weights + block * GROUP, mask=inside[:, None], other=0, eviction_policy="evict_first")
        for nibble in tl.static_range(NIBBLES):
            group = block * 8 + nibble
            bits = ((words >> (4 * nibble)) & 0xF) | 0x4300
            weight = bits.to(tl.int16).to(tl.bfloat16, bitcast=True).to(x.dtype.element_ty) - 136.0
            column = group * GROUP + word
            values = tl.load(
                x + source[None, :] * cols + column[:, None],
                mask=live[None, :] & (column < cols)[:, None],
                other=0.0,
            )
            factor = tl.load(scales + group * rows, mask=inside, other=0.0).to(tl.float32)
            product = tl.dot(weight.to(values.dtype), values, input_precision="ieee")
            acc += product * factor[:, None]
    return acc


@triton.jit
def _dense_tile(
    x, source, live, data, expert, row, rows, cols, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
    inside = row < rows
    for start in range(0, cols, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        held = column < cols
        weight = tl.load(
            data + (expert * rows + row)[:, None] * cols + column[None, :],
            mask=inside[:, None] & held[None, :],
            other=0.0,
        )
        values = tl.load(
            x + source[None, :] * cols + column[:, None], mask=live[None, :] & held[:, None], other=0.0
        )
        acc += tl.dot(weight.to(values.dtype), values, input_precision="ieee")
    return acc


@triton.jit
def _tile(
    x, source, live, data, scale, expert, row, rows, cols, n_words, GROUP: tl.constexpr,
    NIBBLES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of an expert's weights times the pairs of an item, of either storage."""
    if GROUP > 0:
        acc = _int4_tile(
            x, source, live, data, scale, expert, row, rows, cols, n_words, BLOCK_T, BLOCK_R, GROUP, NIBBLES
        )  # fmt: skip
    else:
        acc = _dense_tile(x, source, live, data, expert, row, rows, cols, BLOCK_T, BLOCK_R, BLOCK_K)
    return acc


@triton.jit
def _grouped_program(
    x,
    data,
    scale,
    pair_weight,
    out,
    order,
    item_expert,
    item_first,
    item_count,
    n_items,
    rows,
    cols,
    n_words,
    GROUP: tl.constexpr,
    NIBBLES: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Row r of the output is row r of the product, or silu(row r) * row r + half of it when gated."""
    out_rows = rows // 2 if IS_GATED else rows
    n_row_tiles = tl.cdiv(out_rows, BLOCK_R)
    for tile in range(tl.program_id(0), tl.load(n_items) * n_row_tiles, tl.num_programs(0)):
        item = tile // n_row_tiles
        n_pairs = tl.load(item_count + item)
        if n_pairs > 0:
            slot = tl.arange(0, BLOCK_T)
            live = slot < n_pairs
            pair = tl.load(order + tl.load(item_first + item) + slot, mask=live, other=0).to(tl.int64)
            source = pair // PAIRS_PER_ROW
            expert = tl.load(item_expert + item).to(tl.int64)
            row = (tile % n_row_tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
            inside = row < out_rows
            # The rows of a gate's last tile would run into those of `up`: they are computed and not stored.
            acc = _tile(
                x, source, live, data, scale, expert, row, rows, cols, n_words, GROUP, NIBBLES, BLOCK_T,
                BLOCK_R, BLOCK_K,
            )  # fmt: skip
            if IS_GATED:
                up = _tile(
                    x, source, live, data, scale, expert, row + out_rows, rows, cols, n_words, GROUP,
                    NIBBLES, BLOCK_T, BLOCK_R, BLOCK_K,
                )  # fmt: skip
                acc = acc / (1.0 + tl.exp(-acc)) * up
            if IS_WEIGHTED:
                acc = acc * tl.load(pair_weight + pair, mask=live, other=0.0)[None, :]
            tl.store(
                out + pair[None, :] * out_rows + row[:, None],
                acc.to(out.dtype.element_ty),
                mask=inside[:, None] & live[None, :],
            )


@triton.jit
def _combine_program(
    parts,
    expert_of_pair,
    shared,
    residual,
    width,
    HAS_SHARED: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(N):
        pair = row * N + slot
        held = tl.full((BLOCK,), 0, tl.int32) + tl.load(expert_of_pair + pair) >= 0
        total += tl.load(parts + pair * width + column, mask=inside & held, other=0.0)
    if HAS_SHARED:
        total += tl.load(shared + row * width + column, mask=inside, other=0.0).to(tl.float32)
    target = residual + row * width + column
    tl.store(target, tl.load(target, mask=inside, other=0.0) + total, mask=inside)


def grouped_gemm(
    x: torch.Tensor,
    weights: ExpertWeights,
    work: WorkList,
    *,
    pairs_per_row: int = 1,
    is_gated: bool = False,
    pair_weight: torch.Tensor | None = None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Row p // pairs_per_row of x [*, cols] times the weights of pair p's expert: [P, rows].

    Gated weights are gate above up, and give silu(gate) * up. Rows of pairs without an item stay undefined.
    """
    out_rows = weights.rows // 2 if is_gated else weights.rows
    out = torch.empty(work.order.shape[0], out_rows, dtype=out_dtype, device=x.device)
    x = x.contiguous()
    block_r = 64
    grid = min(work.expert.shape[0] * triton.cdiv(out_rows, block_r), _n_programs(x.device))
    _grouped_program[(grid,)](
        x,
        weights.data,
        weights.scale,
        weights.scale if pair_weight is None else pair_weight,
        out,
        work.order,
        work.expert,
        work.first,
        work.count,
        work.n_items,
        weights.rows,
        weights.cols,
        weights.data.shape[2],
        GROUP=weights.group,
        NIBBLES=_used_nibbles(weights),
        PAIRS_PER_ROW=pairs_per_row,
        IS_GATED=is_gated,
        IS_WEIGHTED=pair_weight is not None,
        BLOCK_T=work.block,
        BLOCK_R=block_r,
        BLOCK_K=64,
        num_warps=8 if work.block == 64 else 4,
        num_stages=3,
    )
    return out


def combine(
    parts: torch.Tensor, expert_of_pair: torch.Tensor, shared: torch.Tensor | None, residual: torch.Tensor
) -> None:
    """Adds the weighted outputs [P, H] fp32 of each row's experts, in order, and `shared` to the residual."""
    n_rows, width = residual.shape
    block = min(triton.next_power_of_2(width), 1024)
    _combine_program[(n_rows, triton.cdiv(width, block))](
        parts,
        expert_of_pair,
        parts if shared is None else shared,
        residual,
        width,
        HAS_SHARED=shared is not None,
        N=parts.shape[0] // n_rows,
        BLOCK=block,
    )


def _n_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _used_nibbles(weights: ExpertWeights) -> int:
    """Nibbles of a word that have columns: fewer than 8 only when one block of words holds all columns."""
    return min(-(-weights.cols // weights.group), 8) if weights.group else 0

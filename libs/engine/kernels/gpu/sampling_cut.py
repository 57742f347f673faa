"""The least logit that a draw may take, by min-p, top-k and top-p, without a sort and without the host.

A program searches the bits of the answer: 16 passes over a row count the tokens, or add the weights, at or
above a value. Ties with the answer are kept, as in `sampling/sampler.py`, whose answers these are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _measure(scaled, weights, width, below, limit, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The count, or the weight, of the values whose size is at most `below`, among those above the limit."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(scaled + column, mask=column < width, other=float("-inf"))
        size = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        kept = (column < width) & (size <= below) & (value >= limit)
        if BY_WEIGHT:
            total += tl.load(weights + column, mask=kept, other=0.0).to(tl.float64)
        else:
            total += kept.to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _search(scaled, weights, width, wanted, limit, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest value at which the measure reaches `wanted`. No value is above 0: bits order their size."""
    half = tl.full((), 0x3FFFFFFF, tl.int32)
    is_large = _measure(scaled, weights, width, half, limit, BY_WEIGHT, BLOCK) < wanted
    found = tl.where(is_large, half + 1, 0)
    for step in range(15):
        quarter = tl.full((), 1, tl.int32) << (28 - 2 * step)
        first = tl.zeros((BLOCK,), tl.float64)
        second = tl.zeros((BLOCK,), tl.float64)
        third = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(scaled + column, mask=column < width, other=float("-inf"))
            size = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            kept = (column < width) & (size < found + 3 * quarter) & (value >= limit)
            if BY_WEIGHT:
                part = tl.load(weights + column, mask=kept, other=0.0).to(tl.float64)
            else:
                part = kept.to(tl.float64)
            third += part
            second += tl.where(size < found + 2 * quarter, part, 0.0)
            first += tl.where(size < found + quarter, part, 0.0)
        n_missed = (tl.sum(first, 0) < wanted).to(tl.int32) + (tl.sum(second, 0) < wanted).to(tl.int32)
        found += (n_missed + (tl.sum(third, 0) < wanted).to(tl.int32)) * quarter
    return -found.to(tl.float32, bitcast=True)


@triton.jit
def _cut_program(
    scaled, weights, min_p_log, top_k, top_p, out, width, row_stride, ALL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scaled += row * row_stride
    weights += row * row_stride
    limit = tl.load(min_p_log + row)
    n_kept = tl.load(top_k + row)
    if (n_kept > 0) & (n_kept < width):
        nothing = tl.full((), float("-inf"), tl.float32)
        kth = _search(scaled, weights, width, n_kept.to(tl.float64), nothing, False, BLOCK)
        limit = tl.maximum(limit, kth)
    share = tl.load(top_p + row)
    if share < 1.0:
        everything = tl.full((), ALL, tl.int32)
        left = _measure(scaled, weights, width, everything, limit, True, BLOCK)
        limit = tl.maximum(limit, _search(scaled, weights, width, share * left, limit, True, BLOCK))
    tl.store(out + row, limit)


def cut_rows(
    scaled: torch.Tensor,
    weights: torch.Tensor,
    min_p_log: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """[R, 1]: the least value of each row [V] that a draw may take.

    scaled [R, V] fp32 has maximum 0 in each row; weights are its exponentials. min_p_log [R] fp32,
    -inf = off; top_k [R] i32, 0 = off; top_p [R] fp64, 1 = off.
    """
    n_rows, width = scaled.shape
    limit = torch.empty(n_rows, 1, dtype=torch.float32, device=scaled.device)
    block = min(triton.next_power_of_2(width), _BLOCK)
    _cut_program[(n_rows,)](
        scaled,
        weights,
        min_p_log,
        top_k,
        top_p,
        limit,
        width,
        scaled.stride(0),
        ALL=0x7FFFFFFF,
        BLOCK=block,
        num_warps=8,
    )
    return limit

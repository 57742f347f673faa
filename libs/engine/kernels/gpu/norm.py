"""RMSNorm, alone or behind the sum of the residual stream, and the gate of an MLP.

The interpreter computes bf16 arithmetic wrongly, so all programs compute in fp32 and round when they store.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _norm_program(
    x, delta, weight, out, x_stride, delta_stride, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + row * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row * x_stride + column, value.to(x.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    normed = value * scale * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * width + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_program(joined, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(joined + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """The norm of x [T, width], or of x + delta, which is then written to x. Rows may be strided."""
    n_rows, width = x.shape
    out = torch.empty(n_rows, width, dtype=out_dtype, device=x.device)
    added = x if delta is None else delta
    block = triton.next_power_of_2(width)
    _norm_program[(n_rows,)](
        x,
        added,
        weight,
        out,
        x.stride(0),
        added.stride(0),
        width,
        eps,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out


def swiglu(joined: torch.Tensor) -> torch.Tensor:
    """joined [T, 2 * width], gate beside up -> silu(gate) * up [T, width] in the same dtype."""
    n_rows, width = joined.shape[0], joined.shape[1] // 2
    out = joined.new_empty(n_rows, width)
    block = min(triton.next_power_of_2(width), 1024)
    _swiglu_program[(n_rows, triton.cdiv(width, block))](joined, out, width, joined.stride(0), BLOCK=block)
    return out

"""Rotary embedding of queries, and the write of normed latent | rotated key into the cache's pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from libs.engine.kernels.gpu.device_plan import DevicePlan

_BLOCK_HEADS = 16


@triton.jit
def _rotate_program(
    q,
    cos_sin,
    row_stride,
    n_heads,
    head_dim,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK)
    cos = tl.load(cos_sin + row * 2 * HALF + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(cos_sin + row * 2 * HALF + HALF + pair, mask=pair < HALF, other=0.0)
    inside = (head < n_heads)[:, None] & (pair < HALF)[None, :]
    even = q + row * row_stride + (head * head_dim + head_dim - 2 * HALF)[:, None] + 2 * pair[None, :]
    x = tl.load(even, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(even + 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(even, (x * cos[None, :] - y * sin[None, :]).to(q.dtype.element_ty), mask=inside)
    tl.store(even + 1, (y * cos[None, :] + x * sin[None, :]).to(q.dtype.element_ty), mask=inside)


@triton.jit
def _store_program(
    kv_a,
    norm,
    cos_sin,
    page_of_row,
    offset_of_row,
    layer_pages,
    row_stride,
    page_stride,
    eps,
    LORA: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_LORA: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_LORA)
    inside = column < LORA
    source = kv_a + row * row_stride
    latent = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    latent *= tl.rsqrt(tl.sum(latent * latent) / LORA + eps)
    latent *= tl.load(norm + column, mask=inside, other=0.0)
    page = tl.load(page_of_row + row).to(tl.int64)
    is_held = page >= 0
    target = layer_pages + page * page_stride + tl.load(offset_of_row + row) * (LORA + 2 * HALF)
    tl.store(target + column, latent.to(layer_pages.dtype.element_ty), mask=inside & is_held)
    pair = tl.arange(0, BLOCK_PAIRS)
    paired = pair < HALF
    cos = tl.load(cos_sin + row * 2 * HALF + pair, mask=paired, other=0.0)
    sin = tl.load(cos_sin + row * 2 * HALF + HALF + pair, mask=paired, other=0.0)
    x = tl.load(source + LORA + 2 * pair, mask=paired, other=0.0).to(tl.float32)
    y = tl.load(source + LORA + 2 * pair + 1, mask=paired, other=0.0).to(tl.float32)
    key = target + LORA + 2 * pair
    tl.store(key, (x * cos - y * sin).to(layer_pages.dtype.element_ty), mask=paired & is_held)
    tl.store(key + 1, (y * cos + x * sin).to(layer_pages.dtype.element_ty), mask=paired & is_held)


def rotate_queries(q: torch.Tensor, rope_dim: int, cos_sin: torch.Tensor) -> None:
    """Rotates the last `rope_dim` values of each head of q [T, heads, head_dim] in place."""
    n_rows, n_heads, head_dim = q.shape
    half = rope_dim // 2
    _rotate_program[(n_rows, triton.cdiv(n_heads, _BLOCK_HEADS))](
        q,
        cos_sin,
        q.stride(0),
        n_heads,
        head_dim,
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        BLOCK_HEADS=_BLOCK_HEADS,
    )


def store_latent(
    kv_a: torch.Tensor, norm: torch.Tensor, eps: float, layer_pages: torch.Tensor, plan: DevicePlan
) -> None:
    """kv_a [T, kv_lora + rope] into layer_pages [n_pages, block_tokens, kv_lora + rope]."""
    lora = norm.shape[0]
    half = (kv_a.shape[1] - lora) // 2
    _store_program[(kv_a.shape[0],)](
        kv_a,
        norm,
        plan.cos_sin,
        plan.page_of_row,
        plan.offset_of_row,
        layer_pages,
        kv_a.stride(0),
        layer_pages.stride(0),
        eps,
        LORA=lora,
        HALF=half,
        BLOCK_LORA=triton.next_power_of_2(lora),
        BLOCK_PAIRS=triton.next_power_of_2(half),
    )

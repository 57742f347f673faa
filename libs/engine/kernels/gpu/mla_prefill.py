"""Causal attention of many rows over keys and values expanded from the latents of one sequence.

The context is expanded in chunks, so that its keys and values never take more memory than one chunk's. Each
chunk's program continues the softmax that the chunks before it left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK_TOKENS = 16384


@triton.jit
def _chunk_program(
    q,
    expanded,
    rope_keys,
    out,
    state,
    q_row_stride,
    expanded_stride,
    rope_stride,
    n_rows,
    chunk_start,
    chunk_len,
    first_position,
    scale,
    IS_FIRST: tl.constexpr,
    N_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < n_rows
    nope_column = tl.arange(0, BLOCK_NOPE)
    rope_column = tl.arange(0, BLOCK_ROPE)
    value_column = tl.arange(0, BLOCK_VALUE)
    is_nope = (nope_column < NOPE)[None, :]
    is_rope = (rope_column < ROPE)[None, :]
    is_value = (value_column < VALUE)[None, :]
    query = q + row.to(tl.int64)[:, None] * q_row_stride + head * (NOPE + ROPE)
    q_n = tl.load(query + nope_column[None, :], mask=live[:, None] & is_nope, other=0.0)
    q_r = tl.load(query + NOPE + rope_column[None, :], mask=live[:, None] & is_rope, other=0.0)
    at = row.to(tl.int64) * N_HEADS + head
    result = out + at[:, None] * VALUE + value_column[None, :]
    if IS_FIRST:
        largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_VALUE), tl.float32)
    else:
        largest = tl.load(state + 2 * at, mask=live, other=float("-inf"))
        total = tl.load(state + 2 * at + 1, mask=live, other=0.0)
        acc = tl.load(result, mask=live[:, None] & is_value, other=0.0) * total[:, None]
    last_row = tl.minimum(tl.program_id(0) * BLOCK_M + BLOCK_M, n_rows) - 1
    end = tl.minimum(chunk_len, first_position + last_row + 1 - chunk_start)
    for start in range(0, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        held = (token < chunk_len)[:, None]
        source = expanded + token.to(tl.int64)[:, None] * expanded_stride + head * (NOPE + VALUE)
        k_n = tl.load(source + nope_column[None, :], mask=held & is_nope, other=0.0)
        k_r = tl.load(
            rope_keys + token.to(tl.int64)[:, None] * rope_stride + rope_column[None, :],
            mask=held & is_rope,
            other=0.0,
        )
        score = tl.dot(q_n, tl.trans(k_n), input_precision="ieee")
        score += tl.dot(q_r, tl.trans(k_r), input_precision="ieee")
        seen = (chunk_start + token)[None, :] <= (first_position + row)[:, None]
        score = tl.where(seen & (token < chunk_len)[None, :], score * scale, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        offset = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        kept = tl.exp(largest - offset)
        weight = tl.exp(score - offset[:, None])
        total = total * kept + tl.sum(weight, 1)
        value = tl.load(source + NOPE + value_column[None, :], mask=held & is_value, other=0.0)
        acc = acc * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        largest = new_largest
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(result, acc / divisor[:, None], mask=live[:, None] & is_value)
    tl.store(state + 2 * at, largest, mask=live)
    tl.store(state + 2 * at + 1, total, mask=live)


def mla_prefill(
    q: torch.Tensor,
    context: torch.Tensor,
    kv_b: torch.Tensor,
    *,
    nope: int,
    value: int,
    scale: float,
    chunk_tokens: int = CHUNK_TOKENS,
) -> torch.Tensor:
    """The rows q [R, heads, nope + rope] are the last of `context` [C, kv_lora + rope]: [R, heads, value].

    kv_b [heads * (nope + value), kv_lora], rows interleaved per head. Heads of q are contiguous. The result
    is fp32.
    """
    n_rows, n_heads, head_dim = q.shape
    n_tokens, lora = context.shape[0], kv_b.shape[1]
    out = torch.empty(n_rows, n_heads, value, dtype=torch.float32, device=q.device)
    state = torch.empty(n_rows, n_heads, 2, dtype=torch.float32, device=q.device)
    # Larger tiles of fp32 leave registers, and a device sets memory aside for the spills of all threads.
    most_rows, block_n = (128, 64) if q.element_size() == 2 else (64, 32)
    block_m = min(max(triton.next_power_of_2(n_rows), 16), most_rows)
    for start in range(0, n_tokens, chunk_tokens):
        chunk = context[start : start + chunk_tokens]
        expanded = chunk[:, :lora] @ kv_b.T
        rope_keys = chunk[:, lora:]
        _chunk_program[(triton.cdiv(n_rows, block_m), n_heads)](
            q,
            expanded,
            rope_keys,
            out,
            state,
            q.stride(0),
            expanded.stride(0),
            rope_keys.stride(0),
            n_rows,
            start,
            chunk.shape[0],
            n_tokens - n_rows,
            scale,
            IS_FIRST=start == 0,
            N_HEADS=n_heads,
            NOPE=nope,
            ROPE=head_dim - nope,
            VALUE=value,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_NOPE=max(triton.next_power_of_2(nope), 16),
            BLOCK_ROPE=max(triton.next_power_of_2(head_dim - nope), 16),
            BLOCK_VALUE=max(triton.next_power_of_2(value), 16),
            num_warps=8 if block_m == most_rows else 4,
            num_stages=2,
        )
    return out

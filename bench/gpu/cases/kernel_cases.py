"""The programs that the report measures: random inputs on a device, a run over them, and the work counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bench.gpu.cases.random_weights import normal, random_int4
from bench.gpu.counting.work import (
    KIMI_K25,
    TINY,
    DeviceShape,
    KernelWork,
    experts_work,
    mla_decode_work,
    mla_prefill_work,
    norm_work,
    rope_work,
    router_work,
    sampling_work,
    swiglu_work,
)
from libs.engine.kernels.gpu.device_plan import DevicePlan
from libs.engine.kernels.gpu.grouped_gemm import combine, grouped_gemm
from libs.engine.kernels.gpu.kv_splits import KvSplits, choose_split_tokens, count_splits
from libs.engine.kernels.gpu.mla_decode import mla_decode
from libs.engine.kernels.gpu.mla_prefill import mla_prefill
from libs.engine.kernels.gpu.norm import rms_norm, swiglu
from libs.engine.kernels.gpu.rope import rotate_queries, store_latent
from libs.engine.kernels.gpu.router import choose_experts
from libs.engine.kernels.gpu.sampling_cut import cut_rows
from libs.engine.kernels.gpu.work_list import build_work_list

_BLOCK_TOKENS = 64
_VOCAB_SIZE = 163840
SCALE = 0.1


@dataclass(frozen=True, slots=True)
class PreparedKernel:
    """`run` does the operation once and returns its result; `inputs` are for peers."""

    run: Callable[[], Any]
    work: KernelWork
    inputs: dict[str, Any] = field(default_factory=dict)


Prepare = Callable[[torch.device], PreparedKernel]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """`prepare` allocates random inputs on a device."""

    name: str
    setting: str
    prepare: Prepare


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """decode: sequences, context, rows of each; prefill: rows, context; dtype: of activations and KV."""

    shape: DeviceShape
    decode: tuple[tuple[int, int, int], ...]
    expert_tokens: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    dtype: torch.dtype
    drawn_rows: tuple[int, ...] = (1, 64)
    vocab_size: int = _VOCAB_SIZE


FULL = KernelSizes(
    KIMI_K25,
    decode=((1, 4096, 1), (1, 32768, 1), (16, 4096, 1), (64, 4096, 1), (16, 4096, 4)),
    expert_tokens=(1, 4, 16, 64, 256),
    prefill=((2048, 2048), (512, 16384)),
    rows=(1, 64, 4096),
    dtype=torch.bfloat16,
)
# The interpreter has no bf16 arithmetic.
SMALL = KernelSizes(
    TINY, ((1, 70, 1), (2, 130, 3)), (1, 3), ((5, 5), (3, 70)), (1, 5), torch.float32, (2,), 500
)


def kernel_cases(sizes: KernelSizes = FULL) -> Iterator[KernelCase]:
    for batch, context, rows in sizes.decode:
        setting = f"{batch} sequences of {context} tokens, {rows} rows"
        yield KernelCase("mla_decode", setting, _decode(sizes, batch, context, rows))
    for tokens in sizes.expert_tokens:
        yield KernelCase("int4_experts", f"{tokens} tokens", _experts(sizes, tokens))
    for rows, context in sizes.prefill:
        yield KernelCase("mla_prefill", f"{rows} rows of {context} tokens", _prefill(sizes, rows, context))
    for tokens in sizes.rows:
        yield KernelCase("add_rms_norm", f"{tokens} rows", _norm(sizes, tokens))
        yield KernelCase("swiglu", f"{tokens} rows", _swiglu(sizes, tokens))
        yield KernelCase("router", f"{tokens} tokens", _router(sizes, tokens))
        yield KernelCase("rope_and_latent", f"{tokens} rows", _rope(sizes, tokens))
    for rows in sizes.drawn_rows:
        yield KernelCase("sampling_cut", f"{rows} rows, top-p", _cut(rows, sizes.vocab_size))


def _plan(device: torch.device, shape: DeviceShape, batch: int, context: int, rows: int) -> DevicePlan:
    def ints(values: torch.Tensor) -> torch.Tensor:
        return values.to(device, torch.int32)

    n_blocks = -(-context // _BLOCK_TOKENS)
    positions = torch.arange(context - rows, context).repeat(batch)
    row_of = torch.arange(batch).repeat_interleave(rows)
    table = torch.randperm(batch * n_blocks).view(batch, n_blocks)
    return DevicePlan(
        cos_sin=torch.randn(batch * rows, 2, shape.rope // 2, device=device),
        page_of_row=ints(table[row_of, positions // _BLOCK_TOKENS]),
        offset_of_row=ints(positions % _BLOCK_TOKENS),
        query_start=ints(torch.arange(batch + 1) * rows),
        context_len=ints(torch.full((batch,), context)),
        page_table=ints(table),
        absorbed=ints(torch.arange(batch)),
        absorbed_rows=ints(torch.arange(batch * rows)),
    )


def _splits(device: torch.device, shape: DeviceShape, batch: int, context: int, rows: int) -> KvSplits:
    most = count_splits(batch, rows, shape.n_heads, n_processors(device))
    lengths = np.full(batch, context, np.int32)
    tokens = choose_split_tokens(lengths, most)
    ends = np.tile(np.arange(context - rows, context, dtype=np.int32) + 1, batch)
    of_row = -(-ends // tokens.repeat(rows))
    return KvSplits(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(of_row).to(device),
        n_splits=int((-(-lengths // tokens)).max()),
        most_rows=rows,
    )


def _decode(sizes: KernelSizes, batch: int, context: int, rows: int) -> Prepare:
    shape, dtype = sizes.shape, sizes.dtype

    def prepare(device: torch.device) -> PreparedKernel:
        plan = _plan(device, shape, batch, context, rows)
        pages = normal(device, plan.page_table.numel(), _BLOCK_TOKENS, shape.lora + shape.rope, dtype=dtype)
        q_latent = normal(device, batch * rows, shape.n_heads, shape.lora, dtype=dtype)
        q_rope = normal(device, batch * rows, shape.n_heads, shape.rope, dtype=dtype)
        splits = _splits(device, shape, batch, context, rows)

        def run() -> torch.Tensor:
            return mla_decode(
                q_latent,
                q_rope,
                pages,
                plan,
                splits,
                scale=SCALE,
            )

        inputs = {"q_latent": q_latent, "q_rope": q_rope, "pages": pages, "plan": plan, "rows": rows}
        return PreparedKernel(run, mla_decode_work(shape, [context] * batch, rows), inputs)

    return prepare


def _prefill(sizes: KernelSizes, rows: int, context: int) -> Prepare:
    shape, dtype = sizes.shape, sizes.dtype

    def prepare(device: torch.device) -> PreparedKernel:
        q = normal(device, rows, shape.n_heads, shape.nope + shape.rope, dtype=dtype)
        latents = normal(device, context, shape.lora + shape.rope, dtype=dtype)
        kv_b = (
            normal(device, shape.n_heads * (shape.nope + shape.value), shape.lora, dtype=dtype)
            / shape.lora**0.5
        )

        def run() -> torch.Tensor:
            return mla_prefill(q, latents, kv_b, nope=shape.nope, value=shape.value, scale=SCALE)

        inputs = {"q": q, "latents": latents, "kv_b": kv_b, "shape": shape}
        return PreparedKernel(run, mla_prefill_work(shape, rows, context), inputs)

    return prepare


def _experts(sizes: KernelSizes, tokens: int) -> Prepare:
    shape, dtype = sizes.shape, sizes.dtype

    def prepare(device: torch.device) -> PreparedKernel:
        # To compile, as many experts as a token has are enough.
        n_experts = shape.n_experts if device.type == "cuda" else shape.n_chosen
        gate_up = random_int4(device, n_experts, 2 * shape.intermediate, shape.hidden, shape.group)
        down = random_int4(device, n_experts, shape.hidden, shape.intermediate, shape.group)
        x = normal(device, tokens, shape.hidden, dtype=dtype)
        residual = normal(device, tokens, shape.hidden, dtype=torch.float32)
        chosen = torch.rand(tokens, n_experts, device=device).topk(shape.n_chosen).indices
        pairs, weight = chosen.flatten().int(), torch.rand(tokens * shape.n_chosen, device=device)

        def run() -> torch.Tensor:
            work = build_work_list(pairs, n_experts)
            hidden = grouped_gemm(
                x, gate_up, work, pairs_per_row=shape.n_chosen, is_gated=True, out_dtype=dtype
            )
            parts = grouped_gemm(hidden, down, work, pair_weight=weight, out_dtype=torch.float32)
            combine(parts, pairs, None, residual)
            return residual

        inputs = {"shape": shape, "n_experts": n_experts, "tokens": tokens, "chosen": chosen}
        return PreparedKernel(run, experts_work(shape, tokens, len(set(pairs.tolist()))), inputs)

    return prepare


def _norm(sizes: KernelSizes, rows: int) -> Prepare:
    shape, dtype = sizes.shape, sizes.dtype

    def prepare(device: torch.device) -> PreparedKernel:
        x = normal(device, rows, shape.hidden, dtype=torch.float32)
        delta, weight = (
            normal(device, rows, shape.hidden, dtype=dtype),
            torch.ones(shape.hidden, device=device),
        )

        def run() -> torch.Tensor:
            return rms_norm(x, weight, 1e-6, dtype, delta)

        return PreparedKernel(run, norm_work(shape, rows), {"delta": delta, "weight": weight})

    return prepare


def _swiglu(sizes: KernelSizes, rows: int) -> Prepare:
    shape, dtype = sizes.shape, sizes.dtype

    def prepare(device: torch.device) -> PreparedKernel:
        joined = normal(device, rows, 2 * shape.intermediate, dtype=dtype)

        def run() -> torch.Tensor:
            return swiglu(joined)

        return PreparedKernel(run, swiglu_work(shape, rows), {"joined": joined})

    return prepare


def _router(sizes: KernelSizes, tokens: int) -> Prepare:
    shape = sizes.shape

    def prepare(device: torch.device) -> PreparedKernel:
        logits = normal(device, tokens, shape.n_experts, dtype=torch.float32)
        bias = torch.zeros(shape.n_experts, device=device)

        def run() -> torch.Tensor:
            ids, _ = choose_experts(
                logits, bias, n_chosen=shape.n_chosen, n_group=1, topk_group=1, normalises=True, scaling=2.8
            )
            return ids

        return PreparedKernel(run, router_work(shape, tokens))

    return prepare


def _rope(sizes: KernelSizes, rows: int) -> Prepare:
    shape, dtype = sizes.shape, sizes.dtype

    def prepare(device: torch.device) -> PreparedKernel:
        plan = _plan(device, shape, 1, rows, rows)
        width = shape.lora + shape.rope
        pages = normal(device, plan.page_table.numel(), _BLOCK_TOKENS, width, dtype=dtype)
        kv_a, norm = normal(device, rows, width, dtype=dtype), torch.ones(shape.lora, device=device)
        q = normal(device, rows, shape.n_heads, shape.nope + shape.rope, dtype=dtype)

        def run() -> torch.Tensor:
            rotate_queries(q, shape.rope, plan.cos_sin)
            store_latent(kv_a, norm, 1e-6, pages, plan)
            return pages

        return PreparedKernel(run, rope_work(shape, rows))

    return prepare


def _cut(rows: int, vocab_size: int) -> Prepare:
    def prepare(device: torch.device) -> PreparedKernel:
        logits = normal(device, rows, vocab_size, dtype=torch.float32) * 3
        scaled = logits - logits.amax(dim=-1, keepdim=True)
        weights = scaled.exp()
        unlimited = torch.full((rows,), -torch.inf, device=device)
        no_top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        top_p = torch.full((rows,), 0.95, dtype=torch.float64, device=device)

        def run() -> torch.Tensor:
            return cut_rows(scaled, weights, unlimited, no_top_k, top_p)

        return PreparedKernel(run, sampling_work(vocab_size, rows))

    return prepare


def n_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

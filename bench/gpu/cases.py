"""The operations that the report measures: a maker of inputs on a device, and the work counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bench.gpu.work import (
    KIMI_K25,
    DeviceShape,
    KernelWork,
    experts_work,
    mla_decode_work,
    mla_prefill_work,
    row_work,
)
from libs.engine.kernels.gpu.device_plan import DevicePlan
from libs.engine.kernels.gpu.expert_weights import ExpertWeights
from libs.engine.kernels.gpu.grouped_gemm import combine, grouped_gemm
from libs.engine.kernels.gpu.mla_decode import choose_split_tokens, mla_decode
from libs.engine.kernels.gpu.mla_prefill import mla_prefill
from libs.engine.kernels.gpu.norm import rms_norm, swiglu
from libs.engine.kernels.gpu.rope import rotate_queries, store_latent
from libs.engine.kernels.gpu.router import choose_experts
from libs.engine.kernels.gpu.work_list import build_work_list

_BLOCK_TOKENS = 64
Run = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Case:
    """`make` allocates random inputs on a device; what it returns runs the operation once."""

    name: str
    setting: str
    make: Callable[[torch.device], tuple[Run, KernelWork]]


def all_cases(shape: DeviceShape = KIMI_K25) -> Iterator[Case]:
    for batch, context, rows in ((1, 4096, 1), (1, 32768, 1), (16, 4096, 1), (64, 4096, 1), (16, 4096, 4)):
        setting = f"{batch} sequences of {context} tokens, {rows} rows"
        yield Case("mla_decode", setting, _decode(shape, batch, context, rows))
    for tokens in (1, 4, 16, 64, 256):
        yield Case("int4_experts", f"{tokens} tokens", _experts(shape, tokens))
    for rows, context in ((2048, 2048), (512, 16384)):
        yield Case("mla_prefill", f"{rows} rows of {context} tokens", _prefill(shape, rows, context))
    for tokens in (1, 64, 4096):
        yield Case("add_rms_norm", f"{tokens} rows", _norm(shape, tokens))
        yield Case("swiglu", f"{tokens} rows", _swiglu(shape, tokens))
        yield Case("router", f"{tokens} tokens", _router(shape, tokens))
        yield Case("rope_and_latent", f"{tokens} rows", _rope(shape, tokens))


def _normal(device: torch.device, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, device=device, dtype=dtype)


def _plan(device: torch.device, batch: int, context: int, rows: int) -> DevicePlan:
    def ints(values: torch.Tensor) -> torch.Tensor:
        return values.to(device, torch.int32)

    n_blocks = -(-context // _BLOCK_TOKENS)
    positions = torch.arange(context - rows, context).repeat(batch)
    row_of = torch.arange(batch).repeat_interleave(rows)
    table = torch.randperm(batch * n_blocks).view(batch, n_blocks)
    return DevicePlan(
        cos_sin=torch.randn(batch * rows, 2, 32, device=device),
        page_of_row=ints(table[row_of, positions // _BLOCK_TOKENS]),
        offset_of_row=ints(positions % _BLOCK_TOKENS),
        query_start=ints(torch.arange(batch + 1) * rows),
        context_len=ints(torch.full((batch,), context)),
        page_table=ints(table),
        absorbed=ints(torch.arange(batch)),
        absorbed_rows=ints(torch.arange(batch * rows)),
        row_end=ints(positions + 1),
    )


def _decode(shape: DeviceShape, batch: int, context: int, rows: int) -> Callable[..., tuple[Run, KernelWork]]:
    def make(device: torch.device) -> tuple[Run, KernelWork]:
        plan = _plan(device, batch, context, rows)
        pages = _normal(device, plan.page_table.numel(), _BLOCK_TOKENS, shape.lora + shape.rope)
        q_latent = _normal(device, batch * rows, shape.n_heads, shape.lora)
        q_rope = _normal(device, batch * rows, shape.n_heads, shape.rope)
        n_tiles = batch * -(-rows * shape.n_heads // 64)
        split = choose_split_tokens(context, n_tiles, n_processors(device))

        def run() -> None:
            mla_decode(
                q_latent,
                q_rope,
                pages,
                plan,
                most_rows=rows,
                longest=context,
                split_tokens=split,
                scale=0.1,
            )

        return run, mla_decode_work(shape, [context] * batch, rows)

    return make


def _prefill(shape: DeviceShape, rows: int, context: int) -> Callable[..., tuple[Run, KernelWork]]:
    def make(device: torch.device) -> tuple[Run, KernelWork]:
        q = _normal(device, rows, shape.n_heads, shape.nope + shape.rope)
        latents = _normal(device, context, shape.lora + shape.rope)
        kv_b = _normal(device, shape.n_heads * (shape.nope + shape.value), shape.lora) / shape.lora**0.5

        def run() -> None:
            mla_prefill(q, latents, kv_b, nope=shape.nope, value=shape.value, scale=0.1)

        return run, mla_prefill_work(shape, rows, context)

    return make


def _random_int4(device: torch.device, n: int, rows: int, cols: int, group: int) -> ExpertWeights:
    limits = torch.iinfo(torch.int32)
    words = torch.randint(
        limits.min, limits.max, (n, rows, cols // 8), dtype=torch.int32, device=device
    )  # every nibble is a valid weight
    scale = torch.rand(n, cols // group, rows, device=device, dtype=torch.bfloat16) * 0.02
    return ExpertWeights(words, scale, rows, cols, group)


def _experts(shape: DeviceShape, tokens: int) -> Callable[..., tuple[Run, KernelWork]]:
    def make(device: torch.device) -> tuple[Run, KernelWork]:
        n_experts = shape.n_experts if device.type == "cuda" else shape.n_chosen
        gate_up = _random_int4(device, n_experts, 2 * shape.intermediate, shape.hidden, shape.group)
        down = _random_int4(device, n_experts, shape.hidden, shape.intermediate, shape.group)
        x = _normal(device, tokens, shape.hidden)
        residual = _normal(device, tokens, shape.hidden, dtype=torch.float32)
        chosen = torch.rand(tokens, n_experts, device=device).topk(shape.n_chosen).indices
        pairs, weight = chosen.flatten().int(), torch.rand(tokens * shape.n_chosen, device=device)

        def run() -> None:
            work = build_work_list(pairs, n_experts)
            hidden = grouped_gemm(
                x, gate_up, work, pairs_per_row=shape.n_chosen, is_gated=True, out_dtype=torch.bfloat16
            )
            parts = grouped_gemm(hidden, down, work, pair_weight=weight, out_dtype=torch.float32)
            combine(parts, pairs, None, residual)

        return run, experts_work(shape, tokens, len(set(pairs.tolist())))

    return make


def _norm(shape: DeviceShape, rows: int) -> Callable[..., tuple[Run, KernelWork]]:
    def make(device: torch.device) -> tuple[Run, KernelWork]:
        x = _normal(device, rows, shape.hidden, dtype=torch.float32)
        delta, weight = _normal(device, rows, shape.hidden), torch.ones(shape.hidden, device=device)
        work = row_work(12 * shape.hidden, rows, 6 * shape.hidden)

        def run() -> None:
            rms_norm(x, weight, 1e-6, torch.bfloat16, delta)

        return run, work

    return make


def _swiglu(shape: DeviceShape, rows: int) -> Callable[..., tuple[Run, KernelWork]]:
    def make(device: torch.device) -> tuple[Run, KernelWork]:
        joined = _normal(device, rows, 2 * shape.intermediate)
        work = row_work(6 * shape.intermediate, rows, 5 * shape.intermediate)

        def run() -> None:
            swiglu(joined)

        return run, work

    return make


def _router(shape: DeviceShape, tokens: int) -> Callable[..., tuple[Run, KernelWork]]:
    def make(device: torch.device) -> tuple[Run, KernelWork]:
        logits = _normal(device, tokens, shape.n_experts, dtype=torch.float32)
        bias = torch.zeros(shape.n_experts, device=device)

        def run() -> None:
            choose_experts(
                logits, bias, n_chosen=shape.n_chosen, n_group=1, topk_group=1, normalises=True, scaling=2.8
            )

        bytes_per_row = 4 * shape.n_experts + 8 * shape.n_chosen
        return run, row_work(bytes_per_row, tokens, shape.n_experts * (4 + shape.n_chosen))

    return make


def _rope(shape: DeviceShape, rows: int) -> Callable[..., tuple[Run, KernelWork]]:
    def make(device: torch.device) -> tuple[Run, KernelWork]:
        plan = _plan(device, 1, rows, rows)
        width = shape.lora + shape.rope
        pages = _normal(device, plan.page_table.numel(), _BLOCK_TOKENS, width)
        kv_a, norm = _normal(device, rows, width), torch.ones(shape.lora, device=device)
        q = _normal(device, rows, shape.n_heads, shape.nope + shape.rope)

        def run() -> None:
            rotate_queries(q, shape.rope, plan.cos_sin)
            store_latent(kv_a, norm, 1e-6, pages, plan)

        rotated = 4 * shape.n_heads * shape.rope
        return run, row_work(rotated + 4 * width + 4 * shape.rope, rows, 2 * rotated + 4 * width)

    return make


def n_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

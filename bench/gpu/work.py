"""Bytes and FLOPs that an operation cannot do without, counted from its shape."""

from __future__ import annotations

from dataclasses import dataclass

_BF16_BYTES = 2
_F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """The dimensions of a model's layers that the kernels depend on."""

    hidden: int
    n_heads: int
    lora: int
    rope: int
    nope: int
    value: int
    n_experts: int
    n_chosen: int
    intermediate: int
    group: int


KIMI_K25 = DeviceShape(7168, 64, 512, 64, 128, 128, 384, 8, 2048, 32)
MOONLIGHT = DeviceShape(2048, 16, 512, 64, 128, 128, 64, 6, 1408, 32)


@dataclass(frozen=True, slots=True)
class KernelWork:
    n_bytes: int
    flops: int


def mla_decode_work(shape: DeviceShape, contexts: list[int], rows: int) -> KernelWork:
    """Every latent is read once; queries and results are `rows` for each sequence."""
    width = shape.lora + shape.rope
    vectors = rows * shape.n_heads
    n_bytes = sum(contexts) * width + len(contexts) * vectors * (width + shape.lora)
    return KernelWork(n_bytes * _BF16_BYTES, sum(contexts) * vectors * 2 * (width + shape.lora))


def mla_prefill_work(shape: DeviceShape, rows: int, context: int) -> KernelWork:
    """Scores and sums of the visible pairs, and the expansion of every latent once."""
    pairs = rows * (context - rows) + rows * (rows + 1) // 2
    expanded = shape.n_heads * (shape.nope + shape.value)
    attention = 2 * pairs * shape.n_heads * (shape.nope + shape.rope + shape.value)
    n_bytes = _BF16_BYTES * (context * (shape.lora + shape.rope) + expanded * shape.lora)
    n_bytes += rows * shape.n_heads * (_BF16_BYTES * (shape.nope + shape.rope) + _F32_BYTES * shape.value)
    return KernelWork(n_bytes, attention + 2 * context * shape.lora * expanded)


def int4_expert_bytes(shape: DeviceShape) -> int:
    """Nibbles and bf16 scales of gate, up and down."""
    weights = 3 * shape.hidden * shape.intermediate
    return weights // 2 + weights // shape.group * _BF16_BYTES


def experts_work(shape: DeviceShape, tokens: int, distinct: int) -> KernelWork:
    """`distinct` experts are read once; each token passes through `n_chosen` of them."""
    n_bytes = distinct * int4_expert_bytes(shape) + tokens * shape.hidden * (_BF16_BYTES + 2 * _F32_BYTES)
    return KernelWork(n_bytes, 2 * 3 * tokens * shape.n_chosen * shape.hidden * shape.intermediate)


def row_work(bytes_per_row: int, rows: int, flops_per_row: int) -> KernelWork:
    return KernelWork(bytes_per_row * rows, flops_per_row * rows)

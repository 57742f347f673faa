"""Bytes and FLOPs that an operation cannot do without, counted from its shape."""

from __future__ import annotations

from collections.abc import Iterable
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
# For the interpreter: the least that has heads in two tiles and columns beyond one block of words.
TINY = DeviceShape(288, 3, 20, 6, 12, 10, 8, 2, 96, 32)


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


def experts_work(shape: DeviceShape, tokens: int, distinct: float) -> KernelWork:
    """`distinct` experts are read once; each token passes through `n_chosen` of them."""
    n_bytes = round(distinct * int4_expert_bytes(shape)) + tokens * shape.hidden * (
        _BF16_BYTES + 2 * _F32_BYTES
    )
    return KernelWork(n_bytes, 2 * 3 * tokens * shape.n_chosen * shape.hidden * shape.intermediate)


def norm_work(shape: DeviceShape, rows: int) -> KernelWork:
    """The fp32 residual stream read and written, a bf16 sum read, the bf16 norm written."""
    row_bytes = shape.hidden * (2 * _F32_BYTES + 2 * _BF16_BYTES)
    return KernelWork(rows * row_bytes, rows * 6 * shape.hidden)


def swiglu_work(shape: DeviceShape, rows: int) -> KernelWork:
    """gate and up read, their product written."""
    return KernelWork(rows * 3 * _BF16_BYTES * shape.intermediate, rows * 5 * shape.intermediate)


def router_work(shape: DeviceShape, tokens: int) -> KernelWork:
    """fp32 logits read; an id and a weight of each chosen expert written."""
    row_bytes = _F32_BYTES * shape.n_experts + 2 * _F32_BYTES * shape.n_chosen
    return KernelWork(tokens * row_bytes, tokens * shape.n_experts * (4 + shape.n_chosen))


def rope_work(shape: DeviceShape, rows: int) -> KernelWork:
    """The rotated part of the queries and a latent row read and written; cosines and sines read."""
    rotated = shape.n_heads * shape.rope
    width = shape.lora + shape.rope
    row_bytes = 2 * _BF16_BYTES * (rotated + width) + _F32_BYTES * shape.rope
    return KernelWork(rows * row_bytes, rows * (8 * rotated + 4 * width))


def sampling_work(vocab_size: int, rows: int) -> KernelWork:
    """fp32 logits read once; the largest of them and the sum of their exponentials."""
    return KernelWork(rows * vocab_size * _F32_BYTES, rows * vocab_size * 3)


def linear_work(rows: int, inputs: int, outputs: int) -> KernelWork:
    """A product with a bf16 matrix, which is read once."""
    n_bytes = _BF16_BYTES * (inputs * outputs + rows * (inputs + outputs))
    return KernelWork(n_bytes, 2 * rows * inputs * outputs)


def total_work(works: Iterable[KernelWork]) -> KernelWork:
    listed = list(works)
    return KernelWork(sum(w.n_bytes for w in listed), sum(w.flops for w in listed))

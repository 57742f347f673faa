"""Bytes and FLOPs of whole steps, operation by operation, counted from a model's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.gpu.counting.work import (
    DeviceShape,
    KernelWork,
    experts_work,
    linear_work,
    mla_decode_work,
    mla_prefill_work,
)
from libs.engine.model_spec.config import ModelConfig

_GROUP = 32


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sequences of equal context with so many rows each; `expands`: attention over keys and values."""

    batch: int
    context: int
    rows: int = 1
    n_logits: int = 1
    expands: bool = False

    @property
    def n_rows(self) -> int:
        return self.batch * self.rows


def device_shape(config: ModelConfig) -> DeviceShape:
    return DeviceShape(
        config.hidden_size,
        config.n_heads,
        config.kv_lora_rank,
        config.qk_rope_head_dim,
        config.qk_nope_head_dim,
        config.v_head_dim,
        config.n_routed_experts,
        config.experts_per_token,
        config.moe_intermediate_size,
        _GROUP,
    )


def expected_experts(n_experts: int, n_chosen: int, n_rows: int) -> float:
    """Distinct experts of so many rows, when each row's choice is uniform."""
    return n_experts * (1 - (1 - n_chosen / n_experts) ** n_rows)


def step_works(
    config: ModelConfig, step: StepShape, distinct: Sequence[float] | None = None
) -> Iterator[KernelWork]:
    """The operations that read weights or KV, in order; what lies between them is small and left out.

    Experts are INT4 in groups of 32, all else bf16. `distinct`: the experts that each layer of them reads;
    None = as many as uniform choices give.
    """
    moe_layers = [layer for layer in range(config.n_layers) if config.is_moe(layer)]
    expected = expected_experts(config.n_routed_experts, config.experts_per_token, step.n_rows)
    read = dict(zip(moe_layers, distinct or [expected] * len(moe_layers), strict=True))
    for layer in range(config.n_layers):
        yield from _attention_works(config, step)
        if layer in read:
            yield from _moe_works(config, step.n_rows, read[layer])
        else:
            yield from _mlp_works(config, step.n_rows, config.dense_intermediate_size)
    yield linear_work(step.batch * step.n_logits, config.hidden_size, config.vocab_size)


def _attention_works(config: ModelConfig, step: StepShape) -> Iterator[KernelWork]:
    rows, hidden, q_width = step.n_rows, config.hidden_size, config.n_heads * config.qk_head_dim
    yield linear_work(rows, hidden, (config.q_lora_rank or q_width) + config.latent_width)
    if config.q_lora_rank is not None:
        yield linear_work(rows, config.q_lora_rank, q_width)
    shape = device_shape(config)
    if step.expands:
        yield from [mla_prefill_work(shape, step.rows, step.context)] * step.batch
    else:
        # Queries take the projection of the keys, results that of the values: each matrix once.
        for width in (config.qk_nope_head_dim, config.v_head_dim):
            yield linear_work(rows, config.kv_lora_rank, config.n_heads * width)
        yield mla_decode_work(shape, [step.context] * step.batch, step.rows)
    yield linear_work(rows, config.n_heads * config.v_head_dim, hidden)


def _moe_works(config: ModelConfig, rows: int, distinct: float) -> Iterator[KernelWork]:
    yield linear_work(rows, config.hidden_size, config.n_routed_experts)
    yield experts_work(device_shape(config), rows, distinct)
    if config.n_shared_experts:
        yield from _mlp_works(config, rows, config.moe_intermediate_size * config.n_shared_experts)


def _mlp_works(config: ModelConfig, rows: int, width: int) -> Iterator[KernelWork]:
    yield linear_work(rows, config.hidden_size, 2 * width)
    yield linear_work(rows, width, config.hidden_size)

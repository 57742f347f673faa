"""Compares a checkpoint's tensors with those that its configuration implies, before any value is read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from libs.engine.model.checkpoint import DENSE_DTYPES, Checkpoint
from libs.engine.model.shards import CheckpointError
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.matrix import DenseMatrix, Int4Matrix

# Kimi-K2.5's image encoder; only text is served.
_VISION = ("vision_tower.", "mm_projector.")
_BYTES_PER_VALUE = {"F32": 4, "BF16": 2, "F16": 4}  # as held: fp16 is widened

_FORMATS = "supported: dense, symmetric pack-quantized INT4 and FP8 blocks"
_KNOWN_SUFFIXES = {
    "weight_zero_point": f"INT4 with zero points (asymmetric) is not supported; {_FORMATS}",
    "weight_g_idx": f"INT4 in activation order (g_idx) is not supported; {_FORMATS}",
    "g_idx": f"GPTQ's activation order (g_idx) is not supported; {_FORMATS}",
    "qweight": f"GPTQ and AWQ weights are not supported; {_FORMATS}",
    "qzeros": f"GPTQ and AWQ zero points are not supported; {_FORMATS}",
    "scales": f"GPTQ and AWQ scales are not supported; {_FORMATS}",
    "weight_global_scale": f"NVFP4 is not supported; {_FORMATS}",
    "input_scale": "static scales of activations are not supported; activations are not quantised",
    "bias": "a bias is not supported: the architecture has none",
}


def check_inventory(checkpoint: Checkpoint, config: ModelConfig) -> int:
    """Raise CheckpointError for the first tensor that is missing, misshaped, of a wrong dtype, or unexpected.

    Returns the bytes of the weights as the engine holds them.
    """
    prefix = checkpoint.text_prefix()
    expected: set[str] = set()
    held_bytes = 0
    for name, shape in vectors(config):
        header = checkpoint.header(f"{prefix}{name}", shape, DENSE_DTYPES)
        expected.add(f"{prefix}{name}")
        held_bytes += math.prod(shape) * _BYTES_PER_VALUE[header.dtype]
    for name, rows, cols in linears(config):
        held_bytes += _check_linear(checkpoint, config, f"{prefix}{name}", rows, cols, expected)
    head = checkpoint.head_name()
    if head is not None:
        header = checkpoint.header(head, (config.vocab_size, config.hidden_size), DENSE_DTYPES)
        expected.add(head)
        held_bytes += math.prod(header.shape) * _BYTES_PER_VALUE[header.dtype]
    elif not config.tie_word_embeddings:
        raise CheckpointError("lm_head.weight", "not in the checkpoint, and the head is not tied")
    _refuse_unexpected(checkpoint, config, prefix, expected)
    checkpoint.expect(expected)
    return held_bytes


def _check_linear(
    checkpoint: Checkpoint, config: ModelConfig, name: str, rows: int, cols: int, expected: set[str]
) -> int:
    layout = checkpoint.layout(name, rows, cols, config.quantization)
    if layout is Int4Matrix:
        expected.update(f"{name}.{part}" for part in ("weight_packed", "weight_scale", "weight_shape"))
        scale = checkpoint.header(f"{name}.weight_scale")
        packed = checkpoint.header(f"{name}.weight_packed")
        return 4 * math.prod(packed.shape) + math.prod(scale.shape) * _BYTES_PER_VALUE[scale.dtype]
    expected.add(f"{name}.weight")
    if layout is DenseMatrix:
        return rows * cols * _BYTES_PER_VALUE[checkpoint.header(f"{name}.weight").dtype]
    expected.add(f"{name}.weight_scale_inv")
    return rows * cols * (2 if config.dtype == "bfloat16" else 4)


def _refuse_unexpected(checkpoint: Checkpoint, config: ModelConfig, prefix: str, expected: set[str]) -> None:
    unexpected = [
        (name, reason)
        for name in checkpoint.names()
        if name not in expected and (reason := _refusal(name, config, prefix)) is not None
    ]
    if unexpected:
        name, reason = min(unexpected)
        others = f" ({len(unexpected)} unexpected tensors)" if len(unexpected) > 1 else ""
        raise CheckpointError(name, f"{reason}{others}")


def _refusal(name: str, config: ModelConfig, prefix: str) -> str | None:
    """Why an unexpected tensor is refused; None for one that no answer depends on."""
    if name.startswith(_VISION) or name.endswith(".rotary_emb.inv_freq"):
        return None
    layer = re.match(rf"{re.escape(prefix)}layers\.(\d{{1,9}})\.", name)
    if layer is not None and int(layer[1]) >= config.n_layers:
        if int(layer[1]) < config.n_layers + config.n_mtp_layers:
            return None  # multi-token prediction
        return (
            f"beyond num_hidden_layers {config.n_layers} and num_nextn_predict_layers {config.n_mtp_layers}"
        )
    reason = _KNOWN_SUFFIXES.get(name.rpartition(".")[2])
    return reason or "unexpected: config.json implies no such tensor"


def vectors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that are no Linear: the embedding, norms and correction biases."""
    yield "embed_tokens.weight", (config.vocab_size, config.hidden_size)
    yield "norm.weight", (config.hidden_size,)
    for layer in range(config.n_layers):
        name = f"layers.{layer}"
        yield f"{name}.input_layernorm.weight", (config.hidden_size,)
        yield f"{name}.post_attention_layernorm.weight", (config.hidden_size,)
        yield f"{name}.self_attn.kv_a_layernorm.weight", (config.kv_lora_rank,)
        if config.q_lora_rank is not None:
            yield f"{name}.self_attn.q_a_layernorm.weight", (config.q_lora_rank,)
        if config.is_moe(layer):
            yield f"{name}.mlp.gate.e_score_correction_bias", (config.n_routed_experts,)


def linears(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Name, output features and input features of each Linear of the layers."""
    hidden, q_rows = config.hidden_size, config.n_heads * config.qk_head_dim
    for layer in range(config.n_layers):
        attention = f"layers.{layer}.self_attn"
        if config.q_lora_rank is None:
            yield f"{attention}.q_proj", q_rows, hidden
        else:
            yield f"{attention}.q_a_proj", config.q_lora_rank, hidden
            yield f"{attention}.q_b_proj", q_rows, config.q_lora_rank
        yield f"{attention}.kv_a_proj_with_mqa", config.latent_width, hidden
        kv_rows = config.n_heads * (config.qk_nope_head_dim + config.v_head_dim)
        yield f"{attention}.kv_b_proj", kv_rows, config.kv_lora_rank
        yield f"{attention}.o_proj", hidden, config.n_heads * config.v_head_dim
        yield from _mlps(config, f"layers.{layer}.mlp", is_moe=config.is_moe(layer))


def _mlps(config: ModelConfig, name: str, *, is_moe: bool) -> Iterator[tuple[str, int, int]]:
    mlps = [(name, config.dense_intermediate_size)]
    if is_moe:
        yield f"{name}.gate", config.n_routed_experts, config.hidden_size
        width = config.moe_intermediate_size
        mlps = [(f"{name}.experts.{expert}", width) for expert in range(config.n_routed_experts)]
        if config.n_shared_experts:
            mlps.append((f"{name}.shared_experts", width * config.n_shared_experts))
    for mlp, width in mlps:
        yield f"{mlp}.gate_proj", width, config.hidden_size
        yield f"{mlp}.up_proj", width, config.hidden_size
        yield f"{mlp}.down_proj", config.hidden_size, width

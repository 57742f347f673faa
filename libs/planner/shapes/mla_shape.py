"""The shape of a DeepSeek-V3 or Kimi-K2 checkpoint, from its `config.json`.

Tensor inventory: the checkpoints' index files; vision tower of Kimi-K2.5 (MoonViT-3d) with its projector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libs.engine.model_spec.config import ModelConfig, parse_config
from libs.engine.model_spec.quantization import Fp8Blocks, Int4Groups
from libs.planner.shapes.config_numbers import ConfigNumbers
from libs.planner.shapes.model_shape import LayerShape, ModelShape, check_layers

BF16 = 2
_FP32 = 4
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# compressed-tensors keeps the original shape of a packed matrix as two int32.
_PACKED_SHAPE_BYTES = 8


def mla_shape(raw: Mapping[str, Any], name: str) -> ModelShape:
    """Raises InvalidArgument that names the key which is missing or unusable."""
    config = parse_config(raw)
    check_layers(config.n_layers)
    value_bytes = _DTYPE_BYTES[config.dtype]
    layers = tuple(_layer(config, index, value_bytes) for index in range(config.n_layers))
    embedding = config.vocab_size * config.hidden_size
    vision = raw.get("vision_config")
    return ModelShape(
        name=name,
        layers=layers,
        hidden_size=config.hidden_size,
        n_heads=config.n_heads,
        kv_heads=1,
        embedding_bytes=embedding * value_bytes,
        head_bytes=(0 if config.tie_word_embeddings else embedding * value_bytes)
        + config.hidden_size * value_bytes,
        head_params=embedding,
        attention_width=config.n_heads * config.v_head_dim,
        vision_bytes=0 if vision is None else _vision_params(vision, config.hidden_size) * BF16,
        max_context_tokens=config.max_position_tokens,
        stored_value_bytes=_stored_value_bytes(config),
    )


def _stored_value_bytes(config: ModelConfig) -> int | None:
    if isinstance(config.quantization, Int4Groups):
        return None
    return 1 if isinstance(config.quantization, Fp8Blocks) else _DTYPE_BYTES[config.dtype]


def _layer(config: ModelConfig, index: int, value_bytes: int) -> LayerShape:
    attention, heads_params = _attention_params(config), _heads_params(config)
    norms = 2 * config.hidden_size + config.kv_lora_rank + (config.q_lora_rank or 0)
    shared, gate_bytes, n_experts, one_expert = 0, 0, 0, 0
    if config.is_moe(index):
        one_expert = 3 * config.hidden_size * config.moe_intermediate_size
        shared = config.n_shared_experts * one_expert
        n_experts = config.n_routed_experts
        gate_bytes = n_experts * (config.hidden_size * value_bytes + _FP32)
    else:
        shared = 3 * config.hidden_size * config.dense_intermediate_size
    heads, rank, rope = config.n_heads, config.kv_lora_rank, config.qk_rope_head_dim
    is_fp8 = isinstance(config.quantization, Fp8Blocks)
    dense_bytes = _fp8_bytes if is_fp8 else _plain_bytes
    return LayerShape(
        attention_bytes=dense_bytes(attention, config, value_bytes) + norms * value_bytes,
        heads_bytes=dense_bytes(heads_params, config, value_bytes),
        heads_params=heads_params,
        attention_params=attention,
        shared_bytes=dense_bytes(shared, config, value_bytes) + gate_bytes,
        expert_bytes=_expert_bytes(config, one_expert, value_bytes),
        n_experts=n_experts,
        experts_per_token=config.experts_per_token if n_experts else 0,
        kv_token_bytes=config.latent_width * BF16,
        kv_window_bytes=0,
        active_params=attention
        + shared
        + (config.experts_per_token * one_expert + n_experts * config.hidden_size if n_experts else 0),
        context_flops=2 * heads * (2 * rank + rope),
        prefill_flops=2 * heads * (config.qk_head_dim + config.v_head_dim),
    )


def _attention_params(config: ModelConfig) -> int:
    hidden = config.hidden_size
    latents = hidden * (config.latent_width + (config.q_lora_rank or 0))
    return latents + _heads_params(config) + config.n_heads * config.v_head_dim * hidden


def _heads_params(config: ModelConfig) -> int:
    """q_b_proj, or q_proj, and kv_b_proj."""
    queries = (config.q_lora_rank or config.hidden_size) * config.qk_head_dim
    return config.n_heads * (queries + config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim))


def _plain_bytes(params: int, config: ModelConfig, value_bytes: int) -> int:
    return params * value_bytes


def _fp8_bytes(params: int, config: ModelConfig, value_bytes: int) -> int:
    """One byte a weight and one fp32 scale a block."""
    assert isinstance(config.quantization, Fp8Blocks)
    block = config.quantization
    return params + params // (block.rows * block.cols) * _FP32


def _expert_bytes(config: ModelConfig, params: int, value_bytes: int) -> int:
    if not params:
        return 0
    if isinstance(config.quantization, Int4Groups):
        scales = params // config.quantization.group_size * BF16
        return params // 2 + scales + 3 * _PACKED_SHAPE_BYTES
    return (_fp8_bytes if config.quantization else _plain_bytes)(params, config, value_bytes)


def _vision_params(section: Any, text_width: int) -> int:
    """MoonViT-3d and the projector to the text model."""
    numbers = ConfigNumbers(section, "vision_config.")
    width, n_blocks = numbers.of("vt_hidden_size"), numbers.of("vt_num_hidden_layers")
    inner, patch = numbers.of("vt_intermediate_size"), numbers.of("patch_size")
    grid = numbers.of("init_pos_emb_height") * numbers.of("init_pos_emb_width")
    merged = 4 * width
    block = 4 * width + (3 * width * width + 3 * width) + (width * width + width)
    block += 2 * width * inner + inner + width
    tower = 3 * patch * patch * width + width + grid * width + n_blocks * block + 2 * width
    projector = 2 * width + merged * merged + merged + text_width * merged + text_width
    return tower + projector

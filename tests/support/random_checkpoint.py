"""Writes random checkpoints in the real file layout: sharded safetensors, index.json, INT4 or FP8, prefixes.

Correction biases and norm weights are random too, because constants of 0 and 1 would hide defects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from libs.engine.model.shards import INDEX_NAME
from libs.engine.model_spec.config import ModelConfig, parse_config
from libs.engine.model_spec.quantization import Fp8Blocks, Int4Groups
from tests.support.quantize import pack_fp8, pack_int4

# The shape of `bench.engine --make`.
BENCH_CONFIG: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "max_position_embeddings": 16384,
    "rope_theta": 50000.0,
}

# Small enough for a test of milliseconds, with every feature of the architecture switched on.
TINY_CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "max_position_embeddings": 4096,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    },
}

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_act": "silu",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """A checkpoint to write. `config` overrides the common keys; `prefix` is that of Kimi-K2.5, or empty.

    quantization  "int4": the experts, as Kimi-K2.5; "fp8": all Linear but the router, as DeepSeek-V3; "none"
    """

    config: dict[str, Any] = field(default_factory=lambda: dict(TINY_CONFIG))
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    quantization: Literal["int4", "fp8", "none"] = "int4"
    fp8_block: tuple[int, int] = (128, 128)
    prefix: Literal["", "language_model."] = ""
    n_shards: int = 2
    # Standard deviation of matrix entries is gain / sqrt(inputs): 1 keeps activations near unit size.
    gain: float = 1.0


def write_random_checkpoint(model_dir: Path, spec: RandomCheckpoint | None = None) -> ModelConfig:
    """Write a checkpoint into `model_dir`, which is created. Returns its configuration."""
    spec = spec or RandomCheckpoint()
    config = write_config(model_dir, spec)
    _write_shards(model_dir, dict(_tensors(config, spec)), spec.n_shards)
    return config


def write_config(model_dir: Path, spec: RandomCheckpoint) -> ModelConfig:
    """Write all but the tensors into `model_dir`, which is created."""
    raw = _COMMON | spec.config | {"torch_dtype": spec.dtype}
    if spec.quantization != "none":
        raw["quantization_config"] = _quantization_config(spec)
    config = parse_config(raw)
    model_dir.mkdir(parents=True, exist_ok=True)
    if spec.prefix:
        raw = {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "tie_word_embeddings": raw["tie_word_embeddings"],
            "text_config": raw,
        }
    (model_dir / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    # Without reasoning, so that requests that say nothing of it measure the plain path.
    (model_dir / "generation_config.json").write_text('{"thinking": false}\n', encoding="utf-8")
    return config


def _tensors(config: ModelConfig, spec: RandomCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model by its name on disk."""
    generator = torch.Generator().manual_seed(spec.seed)
    dtype = getattr(torch, spec.dtype)

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator).mul_(spec.gain * cols**-0.5).to(dtype)

    def norm(width: int) -> torch.Tensor:
        return (1.0 + 0.2 * torch.randn(width, generator=generator)).to(dtype)

    model = f"{spec.prefix}model"
    yield (
        f"{model}.embed_tokens.weight",
        torch.randn(config.vocab_size, config.hidden_size, generator=generator).to(dtype),
    )
    for layer in range(config.n_layers):
        name = f"{model}.layers.{layer}"

        def linear(
            suffix: str, shape: tuple[int, ...], name: str = name
        ) -> Iterator[tuple[str, torch.Tensor]]:
            return _linear(f"{name}.{suffix}", matrix(*shape), config)

        yield f"{name}.input_layernorm.weight", norm(config.hidden_size)
        yield f"{name}.post_attention_layernorm.weight", norm(config.hidden_size)
        for suffix, shape in _attention_shapes(config):
            if len(shape) == 1:
                yield f"{name}.self_attn.{suffix}.weight", norm(shape[0])
            else:
                yield from linear(f"self_attn.{suffix}", shape)
        if not config.is_moe(layer):
            for suffix, shape in _mlp_shapes(config.hidden_size, config.dense_intermediate_size):
                yield from linear(f"mlp.{suffix}", shape)
            continue
        yield f"{name}.mlp.gate.weight", matrix(config.n_routed_experts, config.hidden_size)
        yield (
            f"{name}.mlp.gate.e_score_correction_bias",
            0.2 * torch.randn(config.n_routed_experts, generator=generator),
        )
        if config.n_shared_experts:
            width = config.moe_intermediate_size * config.n_shared_experts
            for suffix, shape in _mlp_shapes(config.hidden_size, width):
                yield from linear(f"mlp.shared_experts.{suffix}", shape)
        for expert in range(config.n_routed_experts):
            for suffix, shape in _mlp_shapes(config.hidden_size, config.moe_intermediate_size):
                yield from linear(f"mlp.experts.{expert}.{suffix}", shape)
    yield f"{model}.norm.weight", norm(config.hidden_size)
    if not config.tie_word_embeddings:
        yield f"{spec.prefix}lm_head.weight", matrix(config.vocab_size, config.hidden_size)


def _linear(name: str, weight: torch.Tensor, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one Linear, quantised where the release of that format quantises it."""
    quantization = config.quantization
    if isinstance(quantization, Fp8Blocks):
        fp8 = pack_fp8(weight, quantization)
        yield f"{name}.weight", fp8.weight
        yield f"{name}.weight_scale_inv", fp8.scale_inv
    elif isinstance(quantization, Int4Groups) and ".experts." in name:
        int4 = pack_int4(weight, quantization.group_size, torch.bfloat16)
        yield f"{name}.weight_packed", int4.packed
        yield f"{name}.weight_scale", int4.scale
        yield f"{name}.weight_shape", torch.tensor(weight.shape, dtype=torch.int32)
    else:
        yield f"{name}.weight", weight


def _attention_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    q_rows = config.n_heads * config.qk_head_dim
    if config.q_lora_rank is None:
        yield "q_proj", (q_rows, config.hidden_size)
    else:
        yield "q_a_proj", (config.q_lora_rank, config.hidden_size)
        yield "q_a_layernorm", (config.q_lora_rank,)
        yield "q_b_proj", (q_rows, config.q_lora_rank)
    yield "kv_a_proj_with_mqa", (config.latent_width, config.hidden_size)
    yield "kv_a_layernorm", (config.kv_lora_rank,)
    yield "kv_b_proj", (config.n_heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank)
    yield "o_proj", (config.hidden_size, config.n_heads * config.v_head_dim)


def _mlp_shapes(hidden_size: int, intermediate_size: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "gate_proj", (intermediate_size, hidden_size)
    yield "up_proj", (intermediate_size, hidden_size)
    yield "down_proj", (hidden_size, intermediate_size)


def _write_shards(model_dir: Path, tensors: dict[str, torch.Tensor], n_shards: int) -> None:
    """Write the tensors to shards in turn, so that one layer's experts are in several files."""
    weight_map: dict[str, str] = {}
    for shard in range(n_shards):
        file_name = f"model-{shard + 1:05d}-of-{n_shards:05d}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % n_shards == shard}
        save_file(part, model_dir / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (model_dir / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _quantization_config(spec: RandomCheckpoint) -> dict[str, Any]:
    if spec.quantization == "fp8":
        block = list(spec.fp8_block)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": block,
        }
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    }

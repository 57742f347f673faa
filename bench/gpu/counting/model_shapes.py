"""The models whose whole steps the report measures: the dimensions of releases, with random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from libs.engine.model_spec.config import ModelConfig, parse_config
from tests.support.random_checkpoint import TINY_CONFIG

KIMI_K25_CONFIG: dict[str, Any] = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
}
_MOONLIGHT = KIMI_K25_CONFIG | {
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.446,
    "max_position_embeddings": 8192,
}


def kimi_k25_cut() -> ModelConfig:
    """Kimi-K2.5 with 8 of its 61 layers, the first of them dense: 69 GiB of weights."""
    return replace(parse_config(KIMI_K25_CONFIG), n_layers=8)


def moonlight() -> ModelConfig:
    """Moonlight-16B-A3B, with its experts in INT4: 11 GiB of weights."""
    return parse_config(_MOONLIGHT)


def tiny() -> ModelConfig:
    """Two layers for the interpreter, one of them dense."""
    return replace(parse_config(TINY_CONFIG | {"first_k_dense_replace": 1}), n_layers=2)

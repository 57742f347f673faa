"""Models of the planner's tests: the published Kimi-K2.5, Llama 4 Scout, and small random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from libs.planner.shapes.llama4_shape import llama4_shape
from libs.planner.shapes.model_shape import LayerShape, ModelShape
from libs.planner.shapes.read_shape import read_shape

KIMI_CONFIG = Path(__file__).parents[2] / "docs/examples/kimi-k2.5"

SCOUT_CONFIG: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "vocab_size": 202048,
        "attention_chunk_size": 8192,
        "max_position_embeddings": 10485760,
    },
    "vision_config": {
        "hidden_size": 1408,
        "num_hidden_layers": 34,
        "intermediate_size": 5632,
        "patch_size": 14,
        "image_size": 336,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
        "vision_output_dim": 4096,
    },
}

# A head of Kimi-K2.5 with MLA, in the sizes of nvidia/Kimi-K2.5-Thinking-Eagle3: its config.json by the
# published description.
KIMI_HEAD: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "rope_theta": 50000.0,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
}


def kimi() -> ModelShape:
    return read_shape(KIMI_CONFIG)


def scout() -> ModelShape:
    return llama4_shape(SCOUT_CONFIG, "scout")


def small_model(layer_bytes: list[int], *, first_bytes: int = 0, last_bytes: int = 0) -> ModelShape:
    """A model whose layers have only attention weights, of the given sizes."""
    layers = tuple(LayerShape(size, 0, 0, size, 0, 0, 0, 0, 1, 0, size, 1, 1) for size in layer_bytes)
    return ModelShape("small", layers, 8, 8, 1, first_bytes, last_bytes, 0, 8, 0, 1024)

"""The shape of a Llama 4 checkpoint, from its `config.json`: the planner's check on another architecture.

The engine does not run it. One layer in four attends to the whole context; the others keep a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libs.planner.shapes.config_numbers import ConfigNumbers
from libs.planner.shapes.model_shape import LayerShape, ModelShape, check_layers
from slipstream.errors import InvalidArgument

_BF16 = 2
_GLOBAL_LAYER_EVERY = 4


def llama4_shape(raw: Mapping[str, Any], name: str) -> ModelShape:
    """bf16 weights. Raises InvalidArgument that names the key which is missing or unusable."""
    if raw.get("quantization_config") is not None:
        raise InvalidArgument("quantization_config", "of Llama 4 is not known to the planner")
    text = ConfigNumbers(raw.get("text_config", raw), "text_config." if "text_config" in raw else "")
    hidden, n_layers = text.of("hidden_size"), text.of("num_hidden_layers")
    check_layers(n_layers)
    is_global = _global_layers(text, n_layers)
    moe_every = text.of("interleave_moe_layer_step", 1)
    layers = tuple(
        _layer(text, is_global=is_global[index], is_moe=(index + 1) % moe_every == 0)
        for index in range(n_layers)
    )
    embedding = text.of("vocab_size") * hidden
    vision = raw.get("vision_config")
    return ModelShape(
        name=name,
        layers=layers,
        hidden_size=hidden,
        n_heads=text.of("num_attention_heads"),
        kv_heads=text.of("num_key_value_heads"),
        embedding_bytes=embedding * _BF16,
        head_bytes=(embedding + hidden) * _BF16,
        head_params=embedding,
        attention_width=text.of("num_attention_heads") * _head_dim(text),
        vision_bytes=0 if vision is None else _vision_params(vision, hidden) * _BF16,
        max_context_tokens=text.of("max_position_embeddings"),
    )


def _global_layers(text: ConfigNumbers, n_layers: int) -> list[bool]:
    """`no_rope_layers` has 0 for a layer without positions, which attends to everything."""
    stated = text.list_of("no_rope_layers")
    if not stated:
        return [(index + 1) % _GLOBAL_LAYER_EVERY == 0 for index in range(n_layers)]
    if len(stated) != n_layers:
        raise InvalidArgument("text_config.no_rope_layers", f"must have {n_layers} entries")
    return [not entry for entry in stated]


def _head_dim(text: ConfigNumbers) -> int:
    return text.of("head_dim", text.of("hidden_size") // text.of("num_attention_heads"))


def _layer(text: ConfigNumbers, *, is_global: bool, is_moe: bool) -> LayerShape:
    hidden, heads = text.of("hidden_size"), text.of("num_attention_heads")
    head_dim = _head_dim(text)
    kv_width = text.of("num_key_value_heads") * head_dim
    heads_params = hidden * (heads * head_dim + 2 * kv_width)
    attention = heads_params + hidden * heads * head_dim
    kv_bytes = 2 * kv_width * _BF16
    n_experts = text.of("num_local_experts") if is_moe else 0
    per_token = text.of("num_experts_per_tok") if is_moe else 0
    expert = 3 * hidden * text.of("intermediate_size") if is_moe else 0
    shared = expert if is_moe else 3 * hidden * text.of("intermediate_size_mlp")
    gate = hidden * n_experts
    return LayerShape(
        attention_bytes=(attention + 2 * hidden) * _BF16,
        heads_bytes=heads_params * _BF16,
        heads_params=heads_params,
        attention_params=attention,
        shared_bytes=(shared + gate) * _BF16,
        expert_bytes=expert * _BF16,
        n_experts=n_experts,
        experts_per_token=per_token,
        kv_token_bytes=kv_bytes if is_global else 0,
        kv_window_bytes=0 if is_global else kv_bytes * text.of("attention_chunk_size"),
        active_params=attention + shared + gate + per_token * expert,
        context_flops=4 * heads * head_dim if is_global else 0,
        prefill_flops=4 * heads * head_dim if is_global else 0,
    )


def _vision_params(section: Any, text_width: int) -> int:
    """The ViT, its pixel-shuffle adapter (2 x 2 patches) and the projector."""
    numbers = ConfigNumbers(section, "vision_config.")
    width, n_blocks = numbers.of("hidden_size"), numbers.of("num_hidden_layers")
    inner, patch, image = numbers.of("intermediate_size"), numbers.of("patch_size"), numbers.of("image_size")
    adapter_in, adapter_out = numbers.of("projector_input_dim"), numbers.of("projector_output_dim")
    positions = (image // patch) ** 2 + 1
    block = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    adapter = inner * adapter_in + adapter_in * adapter_out
    tower = 3 * patch * patch * width + positions * width + n_blocks * block + 5 * width
    return tower + adapter + numbers.of("vision_output_dim") * text_width

"""The text configuration of a Kimi-K2 / DeepSeek-V3 checkpoint, from its `config.json`.

Accepted spellings: nested `text_config` (Kimi-K2.5) or flat; `rope_scaling` with a top-level `rope_theta`, or
`rope_parameters` that holds both; `type` or `rope_type`; `dtype` or `torch_dtype`. The parser uses each key,
knows that it has no effect, or refuses it by name (`known_keys.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.engine.model_spec.config_json import read_config_json
from libs.engine.model_spec.config_section import ConfigSection
from libs.engine.model_spec.known_keys import MULTIMODAL_KEYS, TEXT_KEYS
from libs.engine.model_spec.quantization import Quantization, parse_quantization
from libs.engine.model_spec.rope_config import YarnConfig, parse_rope, yarn_mscale

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of the text model, mostly under the names of `config.json`.

    n_mtp_layers  multi-token-prediction modules behind the layers, which the engine does not run
    """

    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    dense_intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    experts_per_token: int
    n_shared_experts: int
    first_k_dense: int
    moe_layer_freq: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    yarn: YarnConfig | None
    max_position_tokens: int
    tie_word_embeddings: bool
    dtype: str
    quantization: Quantization | None
    n_mtp_layers: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Values per token and layer in the KV cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-0.5 times the squared YaRN temperature (modeling_deepseek_v3.py)."""
        scale = 1.0 / math.sqrt(self.qk_head_dim)
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim) ** 2
        return scale

    def kv_dtype(self, weight_dtype: str, kv_dtype: str) -> str:
        """The dtype of the latent cache; "auto" = bfloat16 where the weights are held in it, else float32."""
        if kv_dtype != "auto":
            return kv_dtype
        held = self.dtype if weight_dtype == "auto" else weight_dtype
        return "bfloat16" if held == "bfloat16" else "float32"

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense and layer % self.moe_layer_freq == 0


def load_config(model_dir: Path) -> ModelConfig:
    """Read `model_dir/config.json`. Raises InvalidArgument naming the key that is missing or unusable."""
    return parse_config(read_config_json(model_dir, "model_dir"))


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse the text model's part of a decoded `config.json`."""
    if raw.get("text_config") is None:
        top = text = ConfigSection(raw, TEXT_KEYS)
    else:
        top = ConfigSection(raw, MULTIMODAL_KEYS)
        text = ConfigSection(raw["text_config"], TEXT_KEYS, "text_config.")
    theta, yarn = parse_rope(text)
    config = ModelConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        n_layers=text.integer("num_hidden_layers"),
        n_heads=text.integer("num_attention_heads"),
        q_lora_rank=None if text.get("q_lora_rank") is None else text.integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
        dense_intermediate_size=text.integer("intermediate_size"),
        moe_intermediate_size=text.integer("moe_intermediate_size"),
        n_routed_experts=text.integer("n_routed_experts"),
        experts_per_token=text.integer("num_experts_per_tok"),
        n_shared_experts=text.integer("n_shared_experts", 0, minimum=0),
        first_k_dense=text.integer("first_k_dense_replace", 0, minimum=0),
        moe_layer_freq=text.integer("moe_layer_freq", 1),
        n_group=text.integer("n_group", 1),
        topk_group=text.integer("topk_group", 1),
        norm_topk_prob=text.boolean("norm_topk_prob", True),
        routed_scaling_factor=text.number("routed_scaling_factor", 1.0),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6, above=0.0),
        rope_theta=theta,
        yarn=yarn,
        max_position_tokens=text.integer("max_position_embeddings"),
        tie_word_embeddings=text.boolean("tie_word_embeddings", top.boolean("tie_word_embeddings", False)),
        dtype=_dtype(text, top),
        quantization=_quantization(text, top),
        n_mtp_layers=text.integer(text.spelling("num_nextn_predict_layers", "num_mtp_layers"), 0, minimum=0),
    )
    _check(config, text)
    return config


def _dtype(text: ConfigSection, top: ConfigSection) -> str:
    names = ("dtype", "torch_dtype")
    section = text if text.get(text.spelling(*names)) is not None else top
    key = section.spelling(*names)
    stated = section.get(key)
    dtype = "bfloat16" if stated is None else str(stated).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise section.refusal(
            key, f"{stated!r} is not supported; supported: {' or '.join(map(repr, _DTYPES))}"
        )
    return dtype


def _quantization(text: ConfigSection, top: ConfigSection) -> Quantization | None:
    """Kimi-K2.5 states the section twice, at the top and in `text_config`."""
    key = "quantization_config"
    inner, outer = text.get(key), top.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise text.refusal(key, f"differs from {key} at the top level; state one of them")
    if inner is not None:
        return parse_quantization(inner, f"{text.path}{key}.")
    return None if outer is None else parse_quantization(outer, f"{key}.")


def _check(config: ModelConfig, text: ConfigSection) -> None:
    text.agrees("num_key_value_heads", config.n_heads, "each head has its own keys and values")
    text.agrees("qk_head_dim", config.qk_head_dim, "it is the sum of qk_nope_head_dim and qk_rope_head_dim")
    text.agrees("head_dim", config.qk_rope_head_dim, "it is qk_rope_head_dim, as transformers writes it")
    if config.qk_rope_head_dim % 2:
        raise text.refusal("qk_rope_head_dim", f"must be even, got {config.qk_rope_head_dim}")
    if config.n_routed_experts % config.n_group:
        raise text.refusal("n_group", f"{config.n_group} does not divide n_routed_experts")
    if config.topk_group > config.n_group:
        raise text.refusal("topk_group", f"{config.topk_group} exceeds n_group {config.n_group}")
    reachable = config.topk_group * (config.n_routed_experts // config.n_group)
    if config.experts_per_token > reachable:
        raise text.refusal("num_experts_per_tok", f"{config.experts_per_token} exceeds {reachable}")

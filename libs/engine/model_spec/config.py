"""The text configuration of a Kimi-K2 / DeepSeek-V3 checkpoint, from its `config.json`.

Accepted spellings: nested `text_config` (Kimi-K2.5) or flat; `rope_scaling` with a top-level `rope_theta`, or
`rope_parameters` that holds both; `type` or `rope_type`; `dtype` or `torch_dtype`. Unknown keys are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.engine.model_spec.config_json import read_config_json
from slipstream.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """DeepSeek YaRN: frequency interpolation by `factor`, and its two attention temperatures."""

    factor: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of the text model, mostly under the names of `config.json`."""

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
    quant_group_size: int

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

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense and layer % self.moe_layer_freq == 0


def yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def load_config(model_dir: Path) -> ModelConfig:
    """Read `model_dir/config.json`. Raises InvalidArgument naming the key that is missing or unusable."""
    return parse_config(read_config_json(model_dir, "model_dir"))


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse the text model's part of a decoded `config.json`."""
    text = _Keys(raw.get("text_config") or raw)
    dtype = text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or raw.get("torch_dtype")
    quant = text.get("quantization_config") or raw.get("quantization_config")
    theta, yarn = _rope(text)
    q_lora_rank = text.get("q_lora_rank")
    config = ModelConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        n_layers=text.integer("num_hidden_layers"),
        n_heads=text.integer("num_attention_heads"),
        q_lora_rank=None if q_lora_rank is None else text.integer("q_lora_rank"),
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
        norm_topk_prob=bool(text.get("norm_topk_prob", True)),
        routed_scaling_factor=text.number("routed_scaling_factor", 1.0),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        yarn=yarn,
        max_position_tokens=text.integer("max_position_embeddings"),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
        dtype=str(dtype or "bfloat16").removeprefix("torch."),
        quant_group_size=_group_size(quant),
    )
    _check(config, text)
    return config


class _Keys:
    """Typed reads from a JSON object, with errors that name the key."""

    def __init__(self, raw: Any) -> None:
        if not isinstance(raw, Mapping):
            raise InvalidArgument("text_config", "not a JSON object")
        self._raw = raw

    def get(self, key: str, default: Any = None) -> Any:
        return self._raw.get(key, default)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if value is None:
            raise InvalidArgument(key, "missing from config.json")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise InvalidArgument(key, f"expected an integer of at least {minimum}, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidArgument(key, f"expected a finite number, got {value!r}")
        return float(value)


def _rope(text: _Keys) -> tuple[float, YarnConfig | None]:
    raw = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope = _Keys(raw)
    theta = rope.number("rope_theta", text.number("rope_theta", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise InvalidArgument("rope_scaling.type", f"expected 'yarn' or 'default', got {kind!r}")
    yarn = YarnConfig(
        factor=rope.number("factor", 1.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        original_max_position=rope.integer("original_max_position_embeddings", 4096),
    )
    return theta, yarn


def _group_size(quant: Any) -> int:
    """INT4 group length along the input dimension; 32 in every Kimi release."""
    groups = quant.get("config_groups", {}) if isinstance(quant, Mapping) else {}
    for group in groups.values():
        size = (group.get("weights") or {}).get("group_size")
        if isinstance(size, int) and size > 0:
            return size
    return 32


def _check(config: ModelConfig, text: _Keys) -> None:
    scoring = text.get("scoring_func", "sigmoid")
    if scoring != "sigmoid":
        raise InvalidArgument("scoring_func", f"expected 'sigmoid', got {scoring!r}")
    if text.get("hidden_act", "silu") != "silu":
        raise InvalidArgument("hidden_act", f"expected 'silu', got {text.get('hidden_act')!r}")
    if text.get("attention_bias"):
        raise InvalidArgument("attention_bias", "not supported: the architecture has none")
    if text.get("rope_interleave", True) is not True:
        raise InvalidArgument("rope_interleave", "only interleaved rotary pairs are supported")
    if config.qk_rope_head_dim % 2:
        raise InvalidArgument("qk_rope_head_dim", f"must be even, got {config.qk_rope_head_dim}")
    if config.n_routed_experts % config.n_group:
        raise InvalidArgument("n_group", f"{config.n_group} does not divide n_routed_experts")
    if config.topk_group > config.n_group:
        raise InvalidArgument("topk_group", f"{config.topk_group} exceeds n_group {config.n_group}")
    reachable = config.topk_group * (config.n_routed_experts // config.n_group)
    if config.experts_per_token > reachable:
        raise InvalidArgument("num_experts_per_tok", f"{config.experts_per_token} exceeds {reachable}")

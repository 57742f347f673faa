"""The configuration of a block drafter's directory: DFlash with layers of Qwen3's type.

Layers with sliding windows (`layer_types`) and YaRN are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libs.engine.eagle.head_rows import KvShape
from libs.engine.model_spec.config_section import ConfigSection
from libs.engine.model_spec.known_keys import BLOCK_FLAG_KEYS, BLOCK_HEAD_KEYS
from libs.engine.model_spec.rope_config import YarnConfig, parse_rope
from slipstream.errors import InvalidArgument

BLOCK_ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True, slots=True)
class BlockHeadConfig:
    """Shape of a block drafter. `block_size` counts the known token and the drafts after it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    mask_token_id: int
    target_layers: tuple[int, ...]
    yarn: YarnConfig | None = None

    @property
    def kv_shape(self) -> KvShape:
        """The shape of the KV of all layers together."""
        return KvShape(self.n_layers * self.n_kv_heads, self.head_dim, self.head_dim)

    @property
    def qk_rope_head_dim(self) -> int:
        """All of a head is rotated."""
        return self.head_dim


def is_block_head(raw: Mapping[str, Any]) -> bool:
    """Whether a decoded `config.json` is one of a block drafter."""
    return raw.get("architectures") == [BLOCK_ARCHITECTURE]


def parse_block_config(raw: Mapping[str, Any]) -> BlockHeadConfig:
    """Parse a decoded `config.json`. Raises InvalidArgument naming the key."""
    layer_types = raw.get("layer_types")
    if layer_types is not None and set(layer_types) != {"full_attention"}:
        raise InvalidArgument("layer_types", "only full_attention is run")
    stated = {key: value for key, value in raw.items() if key != "layer_types"}
    head = ConfigSection(stated, BLOCK_HEAD_KEYS)
    if head.get("architectures") != [BLOCK_ARCHITECTURE]:
        raise head.refusal("architectures", f"must be [{BLOCK_ARCHITECTURE!r}]")
    nested = ConfigSection(raw.get("dflash_config"), BLOCK_FLAG_KEYS, "dflash_config.")
    theta, _ = parse_rope(head, kinds=("default",))
    n_heads, hidden_size = head.integer("num_attention_heads"), head.integer("hidden_size")
    layers = nested.get("target_layer_ids")
    if not isinstance(layers, list) or not layers or not all(type(i) is int and i >= 0 for i in layers):
        raise nested.refusal("target_layer_ids", f"expected layer numbers, got {layers!r}")
    config = BlockHeadConfig(
        vocab_size=head.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=head.integer("intermediate_size"),
        n_layers=head.integer("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=head.integer("num_key_value_heads", n_heads),
        head_dim=head.integer("head_dim", max(hidden_size // n_heads, 1)),
        rms_norm_eps=head.number("rms_norm_eps", 1e-6, above=0.0),
        rope_theta=theta,
        block_size=head.integer("block_size", minimum=2),
        mask_token_id=nested.integer("mask_token_id", minimum=0),
        target_layers=tuple(layers),
    )
    if config.n_heads % config.n_kv_heads:
        raise InvalidArgument("num_key_value_heads", f"does not divide {config.n_heads} heads")
    if config.head_dim % 2:
        raise InvalidArgument("head_dim", "must be even")
    if config.mask_token_id >= config.vocab_size:
        raise InvalidArgument("dflash_config.mask_token_id", "lies outside the vocabulary")
    return config

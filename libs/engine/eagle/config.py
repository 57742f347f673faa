"""The configuration of an EAGLE-3 head directory, in the public formats.

Accepted: `LlamaForCausalLMEagle3` (or the older `LlamaForCausalLM`) with grouped or full attention and plain
rotary positions; `Eagle3DeepseekV2ForCausalLM` with MLA, where the rotary positions may be YaRN's. Both with
`norm_before_residual`, `norm_output`, `fc_norm`, `norm_before_fc` and a smaller draft vocabulary.
`load_head_config` refuses every other variant of the arithmetic, and names it. With other rules than in its
training a head would only propose useless drafts, and no error would show why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.engine.eagle.head_rows import KvShape
from libs.engine.model_spec.config_json import read_config_json
from libs.engine.model_spec.config_section import ConfigSection
from libs.engine.model_spec.known_keys import HEAD_FLAG_KEYS, HEAD_KEYS, LATENT_HEAD_KEYS
from libs.engine.model_spec.rope_config import YarnConfig, parse_rope, yarn_mscale
from slipstream.errors import InvalidArgument

_GROUPED = (["LlamaForCausalLMEagle3"], ["LlamaForCausalLM"])
_LATENT = (["Eagle3DeepseekV2ForCausalLM"],)


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """Attention of a Llama-type head."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LatentShape:
    """MLA, with the names of the target's configuration."""

    n_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape of a head. `draft_vocab_size` <= `vocab_size` (the target's)."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: GroupedShape | LatentShape
    rms_norm_eps: float
    rope_theta: float
    yarn: YarnConfig | None
    norm_before_residual: bool
    norm_output: bool
    fc_norm: bool
    norm_before_fc: bool

    @property
    def qk_rope_head_dim(self) -> int:
        """Rotated values of a key."""
        shape = self.attention
        return shape.head_dim if isinstance(shape, GroupedShape) else shape.qk_rope_head_dim

    @property
    def kv_shape(self) -> KvShape:
        """The shape of the attention's KV. MLA is absorbed: its values are the first part of its keys."""
        shape = self.attention
        if isinstance(shape, GroupedShape):
            return KvShape(shape.n_kv_heads, shape.head_dim, shape.head_dim)
        width = shape.kv_lora_rank + shape.qk_rope_head_dim
        return KvShape(1, width, shape.kv_lora_rank, values_in_keys=True)

    @property
    def softmax_scale(self) -> float:
        """See `ModelConfig.softmax_scale`."""
        shape = self.attention
        if isinstance(shape, GroupedShape):
            return float(shape.head_dim**-0.5)
        scale = float((shape.qk_nope_head_dim + shape.qk_rope_head_dim) ** -0.5)
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim) ** 2
        return scale


def load_head_config(head_dir: Path) -> HeadConfig:
    """Read `head_dir/config.json`. Raises InvalidArgument naming the missing or unsupported key."""
    return parse_head_config(read_config_json(head_dir, "draft_model_dir"))


def parse_head_config(raw: Mapping[str, Any]) -> HeadConfig:
    """Parse the decoded `config.json` of a head. Flags may be at the top or in `eagle_config`."""
    is_latent = raw.get("architectures") in _LATENT
    head = ConfigSection(raw, LATENT_HEAD_KEYS if is_latent else HEAD_KEYS)
    nested = ConfigSection(raw.get("eagle_config") or {}, HEAD_FLAG_KEYS, "eagle_config.")
    if head.get("architectures") not in (*_GROUPED, *_LATENT):
        raise head.refusal(
            "architectures",
            f"{head.get('architectures')!r} is not supported; supported: one of {[*_GROUPED, *_LATENT]}",
        )
    hidden_size = head.integer("hidden_size")
    vocab_size = head.integer("vocab_size")
    rope_theta, yarn = parse_rope(head, kinds=("yarn", "default") if is_latent else ("default",))
    config = HeadConfig(
        vocab_size=vocab_size,
        draft_vocab_size=head.integer("draft_vocab_size", vocab_size),
        hidden_size=hidden_size,
        intermediate_size=head.integer("intermediate_size"),
        attention=_latent_shape(head) if is_latent else _grouped_shape(head, hidden_size),
        rms_norm_eps=head.number("rms_norm_eps", 1e-6, above=0.0),
        rope_theta=rope_theta,
        yarn=yarn,
        norm_before_residual=_flag(head, nested, "norm_before_residual"),
        norm_output=_flag(head, nested, "norm_output"),
        fc_norm=_flag(head, nested, "fc_norm"),
        norm_before_fc=_flag(head, nested, "norm_before_fc"),
    )
    for section in (head, nested):
        section.agrees("target_hidden_size", hidden_size, "features are as wide as the head's hidden_size")
    if config.fc_norm and config.norm_before_fc:
        raise InvalidArgument("norm_before_fc", "contradicts fc_norm: the features have one norm")
    if config.draft_vocab_size > config.vocab_size:
        raise InvalidArgument("draft_vocab_size", f"exceeds vocab_size {config.vocab_size}")
    return config


def _grouped_shape(head: ConfigSection, hidden_size: int) -> GroupedShape:
    n_heads = head.integer("num_attention_heads")
    shape = GroupedShape(
        n_heads=n_heads,
        n_kv_heads=head.integer("num_key_value_heads", n_heads),
        head_dim=head.integer("head_dim", max(hidden_size // n_heads, 1)),
    )
    if shape.n_heads % shape.n_kv_heads:
        raise InvalidArgument("num_key_value_heads", f"does not divide {shape.n_heads} heads")
    if shape.head_dim % 2:
        raise InvalidArgument("head_dim", "must be even")
    return shape


def _latent_shape(head: ConfigSection) -> LatentShape:
    shape = LatentShape(
        n_heads=head.integer("num_attention_heads"),
        q_lora_rank=None if head.get("q_lora_rank") is None else head.integer("q_lora_rank"),
        kv_lora_rank=head.integer("kv_lora_rank"),
        qk_nope_head_dim=head.integer("qk_nope_head_dim"),
        qk_rope_head_dim=head.integer("qk_rope_head_dim"),
        v_head_dim=head.integer("v_head_dim"),
    )
    if shape.qk_rope_head_dim % 2:
        raise InvalidArgument("qk_rope_head_dim", "must be even")
    return shape


def _flag(head: ConfigSection, nested: ConfigSection, key: str) -> bool:
    outer, inner = head.boolean(key, False), nested.boolean(key, False)
    if head.get(key) is not None and nested.get(key) is not None and outer != inner:
        raise nested.refusal(key, f"{inner} contradicts {outer} at the top level")
    return outer or inner

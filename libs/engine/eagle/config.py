"""The configuration of an EAGLE-3 head directory, in the public Llama-type format.

Accepted: `LlamaForCausalLMEagle3` (or the older `LlamaForCausalLM`), grouped or full attention, plain
rotary positions, `norm_before_residual`, `norm_output`, a draft vocabulary smaller than the target's.
`load_head_config` refuses every other variant of the arithmetic, and names it. With other rules than in its
training a head would only propose useless drafts, and no error would show why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.engine.model_spec.config_json import read_config_json
from slipstream.errors import InvalidArgument

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM")
_REFUSED_FLAGS = ("fc_norm", "norm_before_fc", "attention_bias", "mlp_bias")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape of a head. `draft_vocab_size` <= `vocab_size` (the target's)."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    norm_before_residual: bool
    norm_output: bool


def load_head_config(head_dir: Path) -> HeadConfig:
    """Read `head_dir/config.json`. Raises InvalidArgument naming the missing or unsupported key."""
    return parse_head_config(read_config_json(head_dir, "draft_model_dir"))


def parse_head_config(raw: Mapping[str, Any]) -> HeadConfig:
    """Parse the decoded `config.json` of a head. Flags may be at the top or in `eagle_config`."""
    flags = {**raw, **(raw.get("eagle_config") or {})}
    _refuse(raw, flags)
    hidden_size, n_heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    vocab_size = _integer(raw, "vocab_size")
    rope = raw.get("rope_parameters") or {}
    config = HeadConfig(
        vocab_size=vocab_size,
        draft_vocab_size=_integer(raw, "draft_vocab_size", vocab_size),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=_integer(raw, "num_key_value_heads", n_heads),
        head_dim=_integer(raw, "head_dim", hidden_size // n_heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        norm_before_residual=bool(flags.get("norm_before_residual", False)),
        norm_output=bool(flags.get("norm_output", False)),
    )
    if config.draft_vocab_size > config.vocab_size:
        raise InvalidArgument("draft_vocab_size", f"exceeds vocab_size {config.vocab_size}")
    if config.n_heads % config.n_kv_heads:
        raise InvalidArgument("num_key_value_heads", f"does not divide {config.n_heads} heads")
    if config.head_dim % 2:
        raise InvalidArgument("head_dim", "must be even")
    return config


def _refuse(raw: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    architecture = (raw.get("architectures") or [None])[0]
    if architecture not in _ARCHITECTURES:
        raise InvalidArgument("architectures", f"expected one of {_ARCHITECTURES}, got {architecture!r}")
    for flag in _REFUSED_FLAGS:
        if flags.get(flag):
            raise InvalidArgument(flag, "this variant of the head is not supported")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise InvalidArgument("rope_scaling.type", f"expected 'default', got {kind!r}")
    if raw.get("hidden_act", "silu") != "silu":
        raise InvalidArgument("hidden_act", f"expected 'silu', got {raw.get('hidden_act')!r}")
    if raw.get("num_hidden_layers", 1) != 1:
        raise InvalidArgument("num_hidden_layers", f"expected 1, got {raw.get('num_hidden_layers')!r}")
    if flags.get("num_aux_hidden_states", 3) != 3:
        raise InvalidArgument("num_aux_hidden_states", "expected 3")
    target_hidden = flags.get("target_hidden_size")
    if target_hidden is not None and target_hidden != raw.get("hidden_size"):
        raise InvalidArgument("target_hidden_size", "must equal hidden_size")


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(key, f"expected a positive integer in the head's config.json, got {value!r}")
    return value

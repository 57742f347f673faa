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
from libs.engine.model_spec.config_section import ConfigSection
from libs.engine.model_spec.known_keys import HEAD_FLAG_KEYS, HEAD_KEYS
from libs.engine.model_spec.rope_config import parse_rope
from slipstream.errors import InvalidArgument

_ARCHITECTURES = (["LlamaForCausalLMEagle3"], ["LlamaForCausalLM"])


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
    head = ConfigSection(raw, HEAD_KEYS)
    nested = ConfigSection(raw.get("eagle_config") or {}, HEAD_FLAG_KEYS, "eagle_config.")
    if head.get("architectures") not in _ARCHITECTURES:
        raise head.refusal(
            "architectures",
            f"{head.get('architectures')!r} is not supported; supported: one of {_ARCHITECTURES}",
        )
    hidden_size, n_heads = head.integer("hidden_size"), head.integer("num_attention_heads")
    vocab_size = head.integer("vocab_size")
    rope_theta, _ = parse_rope(head, kinds=("default",))
    config = HeadConfig(
        vocab_size=vocab_size,
        draft_vocab_size=head.integer("draft_vocab_size", vocab_size),
        hidden_size=hidden_size,
        intermediate_size=head.integer("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=head.integer("num_key_value_heads", n_heads),
        head_dim=head.integer("head_dim", max(hidden_size // n_heads, 1)),
        rms_norm_eps=head.number("rms_norm_eps", 1e-6, above=0.0),
        rope_theta=rope_theta,
        norm_before_residual=_flag(head, nested, "norm_before_residual"),
        norm_output=_flag(head, nested, "norm_output"),
    )
    for section in (head, nested):
        section.agrees("target_hidden_size", hidden_size, "features are as wide as the head's hidden_size")
    if config.draft_vocab_size > config.vocab_size:
        raise InvalidArgument("draft_vocab_size", f"exceeds vocab_size {config.vocab_size}")
    if config.n_heads % config.n_kv_heads:
        raise InvalidArgument("num_key_value_heads", f"does not divide {config.n_heads} heads")
    if config.head_dim % 2:
        raise InvalidArgument("head_dim", "must be even")
    return config


def _flag(head: ConfigSection, nested: ConfigSection, key: str) -> bool:
    outer, inner = head.boolean(key, False), nested.boolean(key, False)
    if head.get(key) is not None and nested.get(key) is not None and outer != inner:
        raise nested.refusal(key, f"{inner} contradicts {outer} at the top level")
    return outer or inner

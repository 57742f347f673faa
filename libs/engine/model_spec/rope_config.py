"""The rotary embedding of a model, from `rope_scaling` or `rope_parameters`.

YaRN follows transformers 5 (`_compute_yarn_parameters`). DeepSeek's own modelling code reads `mscale` and
`mscale_all_dim` in another way; a configuration to which the two give different values is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from libs.engine.model_spec.config_section import ConfigSection, KeyTable
from libs.engine.model_spec.known_keys import PLAIN_ROPE_KEYS, YARN_KEYS

_DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """DeepSeek YaRN: frequency interpolation by `factor`, and its two attention temperatures.

    attention_factor  scales cosines and sines
    mscale_all_dim    scales the softmax, through `yarn_mscale`; 0 = no scale
    truncate          whether the ends of the ramp are rounded to whole pairs
    """

    factor: float
    beta_fast: float
    beta_slow: float
    mscale_all_dim: float
    original_max_position: int
    attention_factor: float
    truncate: bool


def yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def parse_rope(
    text: ConfigSection, kinds: tuple[str, ...] = ("yarn", "default")
) -> tuple[float, YarnConfig | None]:
    """The base of the frequencies, and YaRN if the model has it."""
    key = text.spelling("rope_parameters", "rope_scaling")
    raw, path = text.get(key), f"{text.path}{key}."
    if raw is None:
        return text.number("rope_theta", _DEFAULT_THETA, above=1.0), None
    loose = ConfigSection(raw, KeyTable(frozenset(raw if isinstance(raw, Mapping) else ())), path)
    kind_key = loose.spelling("type", "rope_type")
    kind = loose.get(kind_key)
    if kind is not None and kind not in kinds:
        raise loose.refusal(
            kind_key, f"{kind!r} is not supported; supported: {' or '.join(map(repr, kinds))}"
        )
    rope = ConfigSection(raw, YARN_KEYS if kind == "yarn" else PLAIN_ROPE_KEYS, path)
    theta = _theta(text, rope)
    return theta, _yarn(rope) if kind == "yarn" else None


def _theta(text: ConfigSection, rope: ConfigSection) -> float:
    outer, inner = text.get("rope_theta"), rope.get("rope_theta")
    if outer is not None and inner is not None and outer != inner:
        raise rope.refusal("rope_theta", f"{inner!r} contradicts {text.path}rope_theta {outer!r}")
    section = text if inner is None else rope
    return section.number("rope_theta", _DEFAULT_THETA, above=1.0)


def _yarn(rope: ConfigSection) -> YarnConfig:
    factor = rope.number("factor")
    if factor < 1.0:
        raise rope.refusal("factor", f"expected at least 1, got {factor!r}")
    beta_fast = rope.number("beta_fast", 32.0, above=0.0)
    beta_slow = rope.number("beta_slow", 1.0, above=0.0)
    if beta_fast < beta_slow:
        raise rope.refusal("beta_fast", f"{beta_fast} is below beta_slow {beta_slow}")
    return YarnConfig(
        factor=factor,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        # transformers and DeepSeek have different defaults.
        original_max_position=rope.integer("original_max_position_embeddings"),
        attention_factor=_attention_factor(rope, factor),
        truncate=rope.boolean("truncate", True),
    )


def _attention_factor(rope: ConfigSection, factor: float) -> float:
    """1.0 whenever mscale equals mscale_all_dim, as in every release."""
    mscale, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor", above=0.0)
    both = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    transformers = both if mscale and all_dim else yarn_mscale(factor, 1.0)
    deepseek = (
        both if rope.get("mscale") is not None else yarn_mscale(factor, 1.0) / yarn_mscale(factor, all_dim)
    )
    if not math.isclose(transformers, deepseek, rel_tol=1e-6):
        raise rope.refusal(
            "mscale",
            f"{rope.get('mscale')!r} with mscale_all_dim {rope.get('mscale_all_dim')!r} scales attention by "
            f"{transformers:.4g} in transformers and by {deepseek:.4g} in DeepSeek's code; "
            "state both of them, or attention_factor",
        )
    return transformers

"""A reference of an EAGLE-3 head with MLA: naive form, one sequence, recomputed from the start, in fp64.

Written from DeepSeek's formulas: keys and values of every head are expanded from the latent, rotary pairs are
neighbours, YaRN interpolates the slow frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from tests.engine.eagle.plain_head import norm
from tests.engine.random_latent_head import YARN, RandomLatentHead

_LATENT_EPS = 1e-6


def frequencies(spec: RandomLatentHead, theta: float = 50000.0) -> list[float]:
    """Angle of each pair for one position."""
    base = [theta ** (-2 * i / spec.rope) for i in range(spec.rope // 2)]
    if not spec.yarn:
        return base

    def pair_of(rotations: float) -> float:
        turns = float(YARN["original_max_position_embeddings"]) / (rotations * 2 * math.pi)
        return spec.rope * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_of(float(YARN["beta_fast"]))), 0)
    high = min(math.ceil(pair_of(float(YARN["beta_slow"]))), spec.rope - 1)
    out = []
    for i, frequency in enumerate(base):
        slow = min(max((i - low) / (high - low or 0.001), 0.0), 1.0)
        out.append(frequency / float(YARN["factor"]) * slow + frequency * (1 - slow))
    return out


def rotate(x: torch.Tensor, position: int, angles: Sequence[float]) -> torch.Tensor:
    """x [rope]: pairs (2i, 2i + 1) turned."""
    out = x.clone()
    for i, frequency in enumerate(angles):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        out[2 * i] = x[2 * i] * cos - x[2 * i + 1] * sin
        out[2 * i + 1] = x[2 * i + 1] * cos + x[2 * i] * sin
    return out


def plain_latent_drafts(
    spec: RandomLatentHead,
    tensors: Mapping[str, torch.Tensor],
    embedding: torch.Tensor,
    features: torch.Tensor,
    next_tokens: Sequence[int],
    start: int,
    n_drafts: int,
) -> list[int]:
    """Drafts after rows (features[i], next_tokens[i]) at positions start + i."""
    w = {name: value.double() for name, value in tensors.items()}
    hidden_rows, tokens = [row.double() for row in features], list(next_tokens)
    drafts: list[int] = []
    for _ in range(n_drafts):
        hidden = _last_hidden(spec, w, embedding.double(), hidden_rows, tokens, start)
        normed = norm(hidden, w["norm.weight"])
        drafts.append(int((w["lm_head.weight"] @ normed).argmax()))
        hidden_rows.append(normed if "norm_output" in spec.flags else hidden)
        tokens.append(drafts[-1])
    return drafts


def _last_hidden(
    spec: RandomLatentHead,
    w: Mapping[str, torch.Tensor],
    embedding: torch.Tensor,
    hidden_rows: Sequence[torch.Tensor],
    tokens: Sequence[int],
    start: int,
) -> torch.Tensor:
    angles, attention = frequencies(spec), "layers.0.self_attn"
    expand = w[f"{attention}.kv_b_proj.weight"].view(spec.n_heads, spec.nope + spec.v, -1)
    keys, values = [], []
    for i, (h, token) in enumerate(zip(hidden_rows, tokens, strict=True)):
        hidden = norm(h, w["layers.0.hidden_norm.weight"])
        a = torch.cat([norm(embedding[token], w["layers.0.input_layernorm.weight"]), hidden])
        kv = w[f"{attention}.kv_a_proj_with_mqa.weight"] @ a
        latent = norm(kv[: spec.kv_lora_rank], w[f"{attention}.kv_a_layernorm.weight"], _LATENT_EPS)
        turned = rotate(kv[spec.kv_lora_rank :], start + i, angles)
        per_head = [rows @ latent for rows in expand]
        keys.append([torch.cat([head[: spec.nope], turned]) for head in per_head])
        values.append([head[spec.nope :] for head in per_head])
        residual = hidden if "norm_before_residual" in spec.flags else h
    scale = (spec.nope + spec.rope) ** -0.5
    if spec.yarn:
        scale *= (0.1 * math.log(float(YARN["factor"])) + 1.0) ** 2
    mixed = []
    for head, q in enumerate(_queries(spec, w, a)):
        q = torch.cat([q[: spec.nope], rotate(q[spec.nope :], start + len(tokens) - 1, angles)])
        weights = (torch.stack([q @ k[head] for k in keys]) * scale).softmax(0)
        mixed.append(sum(p * v[head] for p, v in zip(weights, values, strict=True)))
    x = residual + w[f"{attention}.o_proj.weight"] @ torch.cat(mixed)
    y = norm(x, w["layers.0.post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(w["layers.0.mlp.gate_proj.weight"] @ y)
    return x + w["layers.0.mlp.down_proj.weight"] @ (gate * (w["layers.0.mlp.up_proj.weight"] @ y))


def _queries(spec: RandomLatentHead, w: Mapping[str, torch.Tensor], a: torch.Tensor) -> torch.Tensor:
    attention = "layers.0.self_attn"
    if spec.q_lora_rank is None:
        return (w[f"{attention}.q_proj.weight"] @ a).view(spec.n_heads, -1)
    latent = w[f"{attention}.q_a_proj.weight"] @ a
    latent = norm(latent, w[f"{attention}.q_a_layernorm.weight"], _LATENT_EPS)
    return (w[f"{attention}.q_b_proj.weight"] @ latent).view(spec.n_heads, -1)

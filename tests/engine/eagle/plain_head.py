"""A reference implementation of EAGLE-3: one sequence, recomputed from the start, without a cache.

Written from the formulas (SafeAILab EAGLE, `eagle/model/cnets.py`), one row at a time, in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from tests.engine.random_head import RandomHead


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(x: torch.Tensor, position: int, theta: float = 10000.0) -> torch.Tensor:
    """x [D]: pairs (i, i + D/2) turned by position * theta^(-2i/D)."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        a, b = x[i], x[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def plain_drafts(
    spec: RandomHead,
    tensors: Mapping[str, torch.Tensor],
    features: torch.Tensor,
    next_tokens: Sequence[int],
    start: int,
    n_drafts: int,
) -> list[int]:
    """Drafts after rows (features[i], next_tokens[i]) at positions start + i."""
    w = {name: value.double() for name, value in tensors.items() if value.is_floating_point()}
    layer, flags = spec.layer, dict(spec.extra)
    hidden_rows, tokens = [row.double() for row in features], list(next_tokens)
    drafts: list[int] = []
    for _ in range(n_drafts):
        hidden = _last_hidden(spec, w, layer, flags, hidden_rows, tokens, start)
        normed = norm(hidden, w["norm.weight"])
        draft_id = int((w["lm_head.weight"] @ normed).argmax())
        drafts.append(draft_id + (int(tensors["d2t"][draft_id]) if "d2t" in tensors else 0))
        hidden_rows.append(normed if flags.get("norm_output") else hidden)
        tokens.append(drafts[-1])
    return drafts


def _last_hidden(
    spec: RandomHead,
    w: Mapping[str, torch.Tensor],
    layer: str,
    flags: Mapping[str, object],
    hidden_rows: Sequence[torch.Tensor],
    tokens: Sequence[int],
    start: int,
) -> torch.Tensor:
    keys, values = [], []
    for i, (h, token) in enumerate(zip(hidden_rows, tokens, strict=True)):
        embedded = norm(w["embed_tokens.weight"][token], w[f"{layer}.input_layernorm.weight"])
        hidden = norm(h, w[f"{layer}.hidden_norm.weight"])
        a = torch.cat([embedded, hidden])
        k = (w[f"{layer}.self_attn.k_proj.weight"] @ a).view(spec.n_kv_heads, -1)
        v = (w[f"{layer}.self_attn.v_proj.weight"] @ a).view(spec.n_kv_heads, -1)
        keys.append([rotate(head, start + i) for head in k])
        values.append(v)
        residual = hidden if flags.get("norm_before_residual") else h
    q = (w[f"{layer}.self_attn.q_proj.weight"] @ a).view(spec.n_heads, -1)
    mixed = []
    for head in range(spec.n_heads):
        turned = rotate(q[head], start + len(tokens) - 1)
        group = head // (spec.n_heads // spec.n_kv_heads)
        scores = torch.stack([turned @ k[group] for k in keys]) / math.sqrt(spec.head_dim)
        weights = scores.softmax(0)
        mixed.append(sum(p * v[group] for p, v in zip(weights, values, strict=True)))
    x = residual + w[f"{layer}.self_attn.o_proj.weight"] @ torch.cat(mixed)
    y = norm(x, w[f"{layer}.post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(w[f"{layer}.mlp.gate_proj.weight"] @ y)
    return x + w[f"{layer}.mlp.down_proj.weight"] @ (gate * (w[f"{layer}.mlp.up_proj.weight"] @ y))

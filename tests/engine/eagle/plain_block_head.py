"""Random block drafters (DFlash) and a reference of one: fp64, one sequence, everything recomputed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.engine.eagle.plain_head import norm, rotate


@dataclass(frozen=True)
class RandomBlockHead:
    """A block drafter whose embedding and lm_head are the target's."""

    vocab_size: int = 256
    hidden_size: int = 64
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 6
    mask_token_id: int = 7
    target_layers: tuple[int, ...] = (0, 1)

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": 96,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.n_layers,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "layer_types": ["full_attention"] * self.n_layers,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layers),
            },
        }


def write_random_block_head(head_dir: Path, spec: RandomBlockHead) -> dict[str, torch.Tensor]:
    """Write config and tensors into `head_dir`; return the tensors by name."""
    generator = torch.Generator().manual_seed(0)
    hidden = spec.hidden_size

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator).mul(cols**-0.5)

    def vector(width: int = hidden) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    tensors = {
        "fc.weight": matrix(hidden, len(spec.target_layers) * hidden),
        "hidden_norm.weight": vector(),
        "norm.weight": vector(),
    }
    for layer in (f"layers.{i}" for i in range(spec.n_layers)):
        q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        tensors |= {
            f"{layer}.input_layernorm.weight": vector(),
            f"{layer}.post_attention_layernorm.weight": vector(),
            f"{layer}.self_attn.q_proj.weight": matrix(q, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(kv, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(kv, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, q),
            f"{layer}.self_attn.q_norm.weight": vector(spec.head_dim),
            f"{layer}.self_attn.k_norm.weight": vector(spec.head_dim),
            f"{layer}.mlp.gate_proj.weight": matrix(96, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(96, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, 96),
        }
    head_dir.mkdir(parents=True, exist_ok=True)
    (head_dir / "config.json").write_text(json.dumps(spec.config), encoding="utf-8")
    save_file(tensors, head_dir / "model.safetensors")
    return tensors


def plain_block_drafts(
    spec: RandomBlockHead,
    tensors: Mapping[str, torch.Tensor],
    shared: tuple[torch.Tensor, torch.Tensor],
    features: torch.Tensor,
    token: int,
    start: int,
    n_drafts: int,
) -> list[int]:
    """Drafts after `token`, which follows features at positions start, start + 1, ..."""
    w = {name: value.double() for name, value in tensors.items()}
    embedding, lm_head = (part.double() for part in shared)
    context = [norm(row.double(), w["hidden_norm.weight"]) for row in features]
    block = [token] + [spec.mask_token_id] * n_drafts
    rows = [embedding[t] for t in block]
    for index in range(spec.n_layers):
        rows = _layer(spec, w, f"layers.{index}", context, rows, start)
    return [int((lm_head @ norm(row, w["norm.weight"])).argmax()) for row in rows[1:]]


def _layer(
    spec: RandomBlockHead,
    w: Mapping[str, torch.Tensor],
    layer: str,
    context: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    start: int,
) -> list[torch.Tensor]:
    attention = f"{layer}.self_attn"

    def heads(x: torch.Tensor, which: str, position: int) -> list[torch.Tensor]:
        split = (w[f"{attention}.{which}_proj.weight"] @ x).view(-1, spec.head_dim)
        if which == "v":
            return list(split)
        return [rotate(norm(head, w[f"{attention}.{which}_norm.weight"]), position) for head in split]

    normed = [norm(row, w[f"{layer}.input_layernorm.weight"]) for row in rows]
    seen = [*context, *normed]
    keys = [heads(x, "k", start + i) for i, x in enumerate(seen)]
    values = [heads(x, "v", 0) for x in seen]
    out = []
    for j, (row, x) in enumerate(zip(rows, normed, strict=True)):
        mixed = []
        for head, q in enumerate(heads(x, "q", start + len(context) + j)):
            group = head // (spec.n_heads // spec.n_kv_heads)
            scores = torch.stack([q @ k[group] for k in keys]) / math.sqrt(spec.head_dim)
            mixed.append(sum(p * v[group] for p, v in zip(scores.softmax(0), values, strict=True)))
        y = row + w[f"{attention}.o_proj.weight"] @ torch.cat(mixed)
        z = norm(y, w[f"{layer}.post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(w[f"{layer}.mlp.gate_proj.weight"] @ z)
        out.append(y + w[f"{layer}.mlp.down_proj.weight"] @ (gate * (w[f"{layer}.mlp.up_proj.weight"] @ z)))
    return out

"""Random EAGLE-3 heads in the public file format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class RandomHead:
    """The parts of a head. `layer`, `prefix` are name variants; the target supplies absent parts."""

    vocab_size: int = 256
    draft_vocab_size: int = 256
    hidden_size: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    layer: str = "midlayer"
    prefix: str = ""
    own_embedding: bool = True
    own_lm_head: bool = True
    seed: int = 0
    extra: tuple[tuple[str, Any], ...] = ()  # more config keys

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": 96,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            **dict(self.extra),
        }


def head_tensors(spec: RandomHead) -> dict[str, torch.Tensor]:
    """Return the tensors by their name on disk, without prefix."""
    generator = torch.Generator().manual_seed(spec.seed)
    hidden, q, kv = spec.hidden_size, spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator).mul(cols**-0.5)

    def norm() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(hidden, generator=generator)

    layer = spec.layer
    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden),
        "norm.weight": norm(),
        f"{layer}.hidden_norm.weight": norm(),
        f"{layer}.input_layernorm.weight": norm(),
        f"{layer}.post_attention_layernorm.weight": norm(),
        f"{layer}.self_attn.q_proj.weight": matrix(q, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": matrix(kv, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": matrix(kv, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": matrix(hidden, q),
        f"{layer}.mlp.gate_proj.weight": matrix(96, hidden),
        f"{layer}.mlp.up_proj.weight": matrix(96, hidden),
        f"{layer}.mlp.down_proj.weight": matrix(hidden, 96),
    }
    if spec.own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(spec.vocab_size, hidden, generator=generator)
    if spec.own_lm_head:
        tensors["lm_head.weight"] = matrix(spec.draft_vocab_size, hidden)
    if spec.draft_vocab_size != spec.vocab_size:
        order = torch.randperm(spec.vocab_size, generator=generator)
        used = order[: spec.draft_vocab_size].sort().values
        tensors["d2t"] = used - torch.arange(spec.draft_vocab_size)
        tensors["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill_(0, used, True)
    return tensors


def write_random_head(head_dir: Path, spec: RandomHead | None = None) -> dict[str, torch.Tensor]:
    """Write config and tensors into a new `head_dir`; return the tensors by name without prefix."""
    spec = spec or RandomHead()
    tensors = head_tensors(spec)
    head_dir.mkdir(parents=True, exist_ok=True)
    (head_dir / "config.json").write_text(json.dumps(spec.config), encoding="utf-8")
    stored = {f"{spec.prefix}{name}": value.contiguous() for name, value in tensors.items()}
    save_file(stored, head_dir / "model.safetensors")
    return tensors

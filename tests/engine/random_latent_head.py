"""Random EAGLE-3 heads with MLA, in the layout of `Eagle3DeepseekV2ForCausalLM`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class RandomLatentHead:
    """The parts of a head with MLA; embeddings are the target's, as in the published one."""

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 96
    n_heads: int = 4
    q_lora_rank: int | None = 24
    kv_lora_rank: int = 32
    nope: int = 12
    rope: int = 8
    v: int = 10
    yarn: bool = True
    seed: int = 0
    flags: tuple[str, ...] = ()  # in `eagle_config`

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_heads,
            "num_hidden_layers": 1,
            "first_k_dense_replace": 1,
            "n_routed_experts": 384,
            "moe_intermediate_size": 2048,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.v,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.vocab_size,
            "rms_norm_eps": 1e-5,
            "rope_theta": 50000.0,
            "rope_scaling": YARN if self.yarn else None,
            "hidden_act": "silu",
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
                "use_aux_hidden_state": True,
                **dict.fromkeys(self.flags, True),
            },
        }


def latent_head_tensors(spec: RandomLatentHead) -> dict[str, torch.Tensor]:
    """The tensors by their name on disk."""
    generator = torch.Generator().manual_seed(spec.seed)
    hidden, inputs = spec.hidden_size, 2 * spec.hidden_size

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator).mul(cols**-0.5)

    def norm(width: int = hidden) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    attention, q_rows = "layers.0.self_attn", spec.n_heads * (spec.nope + spec.rope)
    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden),
        "norm.weight": norm(),
        "lm_head.weight": matrix(spec.vocab_size, hidden),
        "layers.0.hidden_norm.weight": norm(),
        "layers.0.input_layernorm.weight": norm(),
        "layers.0.post_attention_layernorm.weight": norm(),
        f"{attention}.kv_a_proj_with_mqa.weight": matrix(spec.kv_lora_rank + spec.rope, inputs),
        f"{attention}.kv_a_layernorm.weight": norm(spec.kv_lora_rank),
        f"{attention}.kv_b_proj.weight": matrix(spec.n_heads * (spec.nope + spec.v), spec.kv_lora_rank),
        f"{attention}.o_proj.weight": matrix(hidden, spec.n_heads * spec.v),
        "layers.0.mlp.gate_proj.weight": matrix(spec.intermediate_size, hidden),
        "layers.0.mlp.up_proj.weight": matrix(spec.intermediate_size, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, spec.intermediate_size),
    }
    if spec.q_lora_rank is None:
        tensors[f"{attention}.q_proj.weight"] = matrix(q_rows, inputs)
    else:
        tensors[f"{attention}.q_a_proj.weight"] = matrix(spec.q_lora_rank, inputs)
        tensors[f"{attention}.q_a_layernorm.weight"] = norm(spec.q_lora_rank)
        tensors[f"{attention}.q_b_proj.weight"] = matrix(q_rows, spec.q_lora_rank)
    if "fc_norm" in spec.flags:
        tensors.update((f"fc_norm.{slot}.weight", norm()) for slot in range(3))
    if "norm_before_fc" in spec.flags:
        tensors["input_norm.weight"] = norm(3 * hidden)
    return tensors


def write_random_latent_head(head_dir: Path, spec: RandomLatentHead) -> dict[str, torch.Tensor]:
    """Write config and tensors into `head_dir`; return the tensors by name."""
    head_dir.mkdir(parents=True, exist_ok=True)
    tensors = latent_head_tensors(spec)
    (head_dir / "config.json").write_text(json.dumps(spec.config), encoding="utf-8")
    save_file(tensors, head_dir / "model.safetensors")
    return tensors

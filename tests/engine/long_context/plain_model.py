"""A plain fp64 reference of the DeepSeek-V3 architecture, for contexts of any length.

It shares no code with the engine and reads the checkpoint's tensors itself. All positions pass every layer
but the last, which computes the wanted ones only. Blocks of queries bound its memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_SCORES = 1 << 24  # of one block of queries: 128 MB


class PlainModel:
    """Dense bf16 or fp32 checkpoints without expert groups; YaRN with equal mscale and mscale_all_dim.

    The angles are products in fp32, as in the releases' own code: at position 262,143 they are off by 0.007.
    """

    def __init__(self, model_dir: Path, *, yarn: bool = True) -> None:
        self.config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        self.tensors = {
            name: tensor.double()
            for path in sorted(model_dir.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        self._yarn: dict[str, Any] | None = self.config["rope_scaling"] if yarn else None

    def logits(self, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """[len(positions), vocabulary]: the logits after the token at each position."""
        last, wanted = self.config["num_hidden_layers"] - 1, torch.tensor(positions)
        every = torch.arange(len(ids))
        x = self.tensors["model.embed_tokens.weight"][torch.tensor(ids)]
        for layer in range(last + 1):
            x = self._layer(layer, x, wanted if layer == last else every)
        return self._norm(x, "model.norm", self.config["rms_norm_eps"]) @ self.tensors["lm_head.weight"].T

    def _layer(self, layer: int, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The layer's output for `rows`, given its input x at all positions."""
        name, eps = f"model.layers.{layer}", self.config["rms_norm_eps"]
        mixed = self._attention(f"{name}.self_attn", self._norm(x, f"{name}.input_layernorm", eps), rows)
        x = x[rows] + mixed
        normed = self._norm(x, f"{name}.post_attention_layernorm", eps)
        is_dense = layer < self.config["first_k_dense_replace"]
        return x + (self._mlp(f"{name}.mlp", normed) if is_dense else self._experts(f"{name}.mlp", normed))

    def _attention(self, name: str, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        c = self.config
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        q = self._norm(self._linear(f"{name}.q_a_proj", x[rows]), f"{name}.q_a_layernorm", 1e-6)
        q = self._linear(f"{name}.q_b_proj", q).view(len(rows), heads, nope + rope)
        latent, k_rope = torch.split(
            self._linear(f"{name}.kv_a_proj_with_mqa", x), [c["kv_lora_rank"], rope], -1
        )
        kv = self._linear(f"{name}.kv_b_proj", self._norm(latent, f"{name}.kv_a_layernorm", 1e-6))
        k_nope, v = torch.split(kv.view(len(x), heads, -1), [nope, c["v_head_dim"]], -1)
        k_rope = self._rotate(k_rope, torch.arange(len(x)))
        out = []
        for head in range(heads):
            queries = torch.cat((q[:, head, :nope], self._rotate(q[:, head, nope:], rows)), -1)
            keys = torch.cat((k_nope[:, head], k_rope), -1)
            out.append(attend(queries * self._softmax_scale(), keys, v[:, head].contiguous(), rows))
        return self._linear(f"{name}.o_proj", torch.cat(out, -1))

    def _softmax_scale(self) -> float:
        scale = (self.config["qk_nope_head_dim"] + self.config["qk_rope_head_dim"]) ** -0.5
        if self._yarn is None:
            return float(scale)
        mscale = float(0.1 * self._yarn["mscale_all_dim"] * math.log(self._yarn["factor"]) + 1.0)
        return float(scale) * mscale * mscale

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = (positions.float()[:, None] * self._frequencies()).double()
        even, odd = x[:, 0::2], x[:, 1::2]
        turned = (even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin())
        return torch.stack(turned, -1).flatten(1)

    def _frequencies(self) -> torch.Tensor:
        """fp32, as the releases hold them."""
        dim, theta = self.config["qk_rope_head_dim"], self.config["rope_theta"]
        base: torch.Tensor = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        yarn = self._yarn
        if yarn is None:
            return base
        turns = yarn["original_max_position_embeddings"] / (2 * math.pi)
        low, high = (
            dim * math.log(turns / yarn[f"beta_{end}"]) / (2 * math.log(theta)) for end in ("fast", "slow")
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        mixed: torch.Tensor = base / yarn["factor"] * ramp + base * (1 - ramp)
        return mixed

    def _experts(self, name: str, x: torch.Tensor) -> torch.Tensor:
        affinity = (x @ self.tensors[f"{name}.gate.weight"].T).sigmoid()
        biased = affinity + self.tensors[f"{name}.gate.e_score_correction_bias"]
        chosen = biased.topk(self.config["num_experts_per_tok"]).indices
        weights = affinity.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        out = self._mlp(f"{name}.shared_experts", x)
        for row in range(len(x)):
            for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
                out[row] += weight * self._mlp(f"{name}.experts.{expert}", x[row])
        return out

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._linear(f"{name}.gate_proj", x), self._linear(f"{name}.up_proj", x)
        return self._linear(f"{name}.down_proj", gate * gate.sigmoid() * up)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _norm(self, x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.tensors[f"{name}.weight"]


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Causal attention of one head: queries at positions `rows`, ascending, to the keys up to their own."""
    out = torch.empty(len(rows), values.shape[1], dtype=values.dtype)
    for part in blocks(rows):
        visible = int(rows[part][-1]) + 1
        scores = queries[part] @ keys[:visible].T
        first = int(rows[part][0])
        scores[:, first:] += torch.where(torch.arange(first, visible) > rows[part][:, None], -torch.inf, 0.0)
        out[part] = scores.softmax(-1) @ values[:visible]
    return out


def blocks(rows: torch.Tensor) -> Iterator[slice]:
    """Consecutive rows whose scores fit in memory together."""
    start = 0
    while start < len(rows):
        end = start + 1
        while end < len(rows) and (end + 1 - start) * (int(rows[end]) + 1) <= _SCORES and end - start < 256:
            end += 1
        yield slice(start, end)
        start = end

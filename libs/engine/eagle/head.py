"""The arithmetic of an EAGLE-3 head (SafeAILab EAGLE, `eagle/model/cnets.py`), for many sequences at once.

    step(h, token, position):
      a = [input_norm(embed(token)) | hidden_norm(h)]             2H values
      x = h + attention(a, position)                              h normed with norm_before_residual
      h' = x + mlp(post_norm(x))
      draft = target_ids[argmax lm_head(norm(h'))];  next h = h'  (norm(h') with norm_output)

With one layer the keys and values of a row depend only on its own inputs. So rows of the context need only
their projection, and attention runs only for the newest row of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear, silu

from libs.engine.eagle.config import HeadConfig, load_head_config
from libs.engine.eagle.weights import HeadWeights, load_head_weights
from libs.engine.model.checkpoint import weights_digest


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """Rows through the first projection. `residual` [T, H], `q` [T, heads, D], `k`, `v` [T, kv_heads, D]."""

    residual: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class EagleHead:
    """A loaded head, without state. `libs/engine/eagle/drafter.py` keeps the contexts."""

    def __init__(self, config: HeadConfig, weights: HeadWeights, digest: str = "") -> None:
        self.config = config
        self.digest = digest  # hex, over the head's files
        self._weights = weights
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        self._frequencies = (config.rope_theta**-half).float()

    @classmethod
    def load(cls, head_dir: Path, target_dir: Path, *, dtype: torch.dtype = torch.float32) -> EagleHead:
        """Load a head. Raises InvalidArgument or CheckpointError, naming the missing or unsupported part."""
        config = load_head_config(head_dir)
        weights = load_head_weights(head_dir, target_dir, config, dtype=dtype)
        return cls(config, weights, weights_digest(head_dir))

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.qkv.dtype

    def project(self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> HeadInputs:
        """Project rows: hidden [T, H], tokens [T] i64, positions [T] i64."""
        c, w = self.config, self._weights
        hidden = hidden.to(w.qkv.dtype)
        normed = _rms_norm(hidden, w.hidden_norm, c.rms_norm_eps)
        embedded = _rms_norm(w.embedding[tokens], w.input_norm, c.rms_norm_eps)
        qkv = linear(torch.cat([embedded, normed], dim=-1), w.qkv)
        heads = qkv.view(len(tokens), c.n_heads + 2 * c.n_kv_heads, c.head_dim)
        q, k, v = torch.split(heads, [c.n_heads, c.n_kv_heads, c.n_kv_heads], dim=1)
        cos, sin = self._angles(positions)
        return HeadInputs(
            residual=normed if c.norm_before_residual else hidden,
            q=_rotate(q, cos, sin),
            k=_rotate(k, cos, sin),
            v=v,
        )

    def attend(
        self, inputs: HeadInputs, contexts: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from one row of each of S sequences to its keys and values [kv_heads, n, D].

        Contexts differ in length, and a padded copy of all of them would cost more than the attention.
        Returns the next hidden states [S, H] and the drafted token ids [S].
        """
        c, w = self.config, self._weights
        q = inputs.q.view(len(contexts), c.n_kv_heads, -1, c.head_dim) * c.head_dim**-0.5
        mixed = torch.empty_like(q)
        for i, (keys, values) in enumerate(contexts):
            torch.matmul((q[i] @ keys.transpose(1, 2)).softmax(dim=-1), values, out=mixed[i])
        x = inputs.residual + linear(mixed.flatten(1), w.o_proj)
        gate, up = linear(_rms_norm(x, w.post_norm, c.rms_norm_eps), w.gate_up).chunk(2, dim=-1)
        hidden = x + linear(silu(gate) * up, w.down)
        normed = _rms_norm(hidden, w.norm, c.rms_norm_eps)
        drafts = w.target_ids[linear(normed, w.lm_head).argmax(dim=-1)]
        return normed if c.norm_output else hidden, drafts

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        dtype = self._weights.qkv.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Llama's rotary positions, with the pairs (x_i, x_{i + D/2})."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight

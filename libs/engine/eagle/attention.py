"""Attention of a draft head from one row of each sequence to its context, for both kinds of heads.

MLA runs in its absorbed form. Its context is then one key of latent and rotated part for all heads, and the
value is the latent. So a context has the same form for both kinds: keys and values of `n_kv_heads`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libs.engine.eagle.attended import AttendedRows
from libs.engine.eagle.config import GroupedShape, HeadConfig, LatentShape
from libs.engine.kernels.interface import Kernels
from libs.engine.model_spec.matrix import DenseMatrix
from libs.engine.model_spec.rope import Rope, rotate

LATENT_NORM_EPS = 1e-6  # as the target's latent norms


@dataclass(frozen=True, slots=True)
class ProjectedRows:
    """q [T, n_heads, key_width], keys [T, n_kv_heads, key_width], values [T, n_kv_heads, value_width]."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    """Matrices [out, in] as stored."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Matrices [out, in] as stored. Without `q_a` the queries have no latent, and `q_b` is q_proj."""

    q_a: torch.Tensor | None
    q_norm: torch.Tensor | None
    q_b: torch.Tensor
    kv_a: torch.Tensor
    kv_norm: torch.Tensor
    kv_b: torch.Tensor  # [heads * (nope + v), kv_lora], rows interleaved per head


class GroupedAttention:
    """Grouped or full attention with rotary positions on all of a head."""

    def __init__(
        self, shape: GroupedShape, weights: GroupedWeights, config: HeadConfig, kernels: Kernels
    ) -> None:
        self.shape, self.rope, self._kernels = shape, Rope(config, kernels.place), kernels
        self._scale = config.softmax_scale
        # Llama rotates the pairs (i, i + D/2), the kernels neighbours: equal scores from reordered rows.
        parts = (interleaved(weights.q, shape.head_dim), interleaved(weights.k, shape.head_dim), weights.v)
        self.qkv = kernels.pack(DenseMatrix(torch.cat(parts)))

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> ProjectedRows:
        """x [T, 2H], positions [T] i64."""
        shape = self.shape
        rows = self._kernels.linear(x, self.qkv).view(len(x), -1, shape.head_dim)
        rotated = shape.n_heads + shape.n_kv_heads
        self._kernels.rotate_queries(rows[:, :rotated], shape.head_dim, self.rope.cos_sin(positions))
        return ProjectedRows(rows[:, : shape.n_heads], rows[:, shape.n_heads : rotated], rows[:, rotated:])

    def attend(self, q: torch.Tensor, rows: AttendedRows, n_behind: int) -> torch.Tensor:
        """q [S, n_heads, key_width] -> [S, n_heads * head_dim]."""
        return rows.mix(q[:, None], n_behind, scale=self._scale).flatten(1)


class LatentAttention:
    """MLA, absorbed."""

    def __init__(
        self, shape: LatentShape, weights: LatentWeights, config: HeadConfig, kernels: Kernels
    ) -> None:
        self._shape, self._kernels = shape, kernels
        self._scale, self._rope = config.softmax_scale, Rope(config, kernels.place)
        self._q_a = None if weights.q_a is None else kernels.pack(DenseMatrix(weights.q_a))
        self._q_norm = None if weights.q_norm is None else kernels.place(weights.q_norm.float())
        self._q_b = kernels.pack(DenseMatrix(weights.q_b))
        self._kv_a = kernels.pack(DenseMatrix(weights.kv_a))
        self._kv_norm = kernels.place(weights.kv_norm.float())
        per_head = kernels.place(weights.kv_b.to(kernels.dtype)).view(shape.n_heads, -1, shape.kv_lora_rank)
        self._uk = per_head[:, : shape.qk_nope_head_dim].contiguous()  # [heads, nope, lora]
        self._uv = per_head[:, shape.qk_nope_head_dim :].transpose(1, 2).contiguous()  # [heads, lora, v]

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> ProjectedRows:
        """x [T, 2H], positions [T] i64."""
        shape, kernels = self._shape, self._kernels
        cos_sin = self._rope.cos_sin(positions)
        latent = x
        if self._q_a is not None and self._q_norm is not None:
            latent = kernels.rms_norm(kernels.linear(x, self._q_a), self._q_norm, LATENT_NORM_EPS)
        q = kernels.linear(latent, self._q_b).view(len(x), shape.n_heads, -1)
        kernels.rotate_queries(q, shape.qk_rope_head_dim, cos_sin)
        plain, rotated = q[..., : shape.qk_nope_head_dim], q[..., shape.qk_nope_head_dim :]
        absorbed = torch.matmul(plain.transpose(0, 1), self._uk).transpose(0, 1)
        kv = kernels.linear(x, self._kv_a)
        values = kernels.rms_norm(kv[:, : shape.kv_lora_rank], self._kv_norm, LATENT_NORM_EPS)
        rotated_keys = rotate(kv[:, shape.kv_lora_rank :], cos_sin).to(kv.dtype)
        keys = torch.cat([values, rotated_keys], dim=-1)
        return ProjectedRows(torch.cat([absorbed, rotated], dim=-1), keys[:, None], values[:, None])

    def attend(self, q: torch.Tensor, rows: AttendedRows, n_behind: int) -> torch.Tensor:
        """q [S, n_heads, key_width] -> [S, n_heads * v_head_dim]."""
        mixed = rows.mix(q[:, None], n_behind, scale=self._scale)[:, 0]
        return torch.matmul(mixed.transpose(0, 1), self._uv).transpose(0, 1).flatten(1)


HeadAttention = GroupedAttention | LatentAttention


def make_attention(
    config: HeadConfig, weights: GroupedWeights | LatentWeights, kernels: Kernels
) -> HeadAttention:
    """The attention of a head's kind."""
    if isinstance(config.attention, GroupedShape):
        assert isinstance(weights, GroupedWeights)
        return GroupedAttention(config.attention, weights, config, kernels)
    assert isinstance(weights, LatentWeights)
    return LatentAttention(config.attention, weights, config, kernels)


def interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head in the order 0, D/2, 1, D/2 + 1, ..."""
    halves = weight.view(-1, 2, head_dim // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)

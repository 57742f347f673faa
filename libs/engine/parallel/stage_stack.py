"""Runs the layers of one stage on one rank: the rank's part of each operation, then a sum over the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from libs.engine.kernels.interface import Kernels, ShareKernels
from libs.engine.kernels.layer import Attention, Layer
from libs.engine.model.stack import store_and_query
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.plan import BatchPlan
from libs.engine.parallel.links import GroupLinks


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The rows of a micro-batch whose attention this rank computes; the plan is None without such rows."""

    rows: slice
    attention: BatchPlan | None


@dataclass(frozen=True, slots=True)
class StageStack:
    """The stage's layers. `local` is the model's configuration with the rank's number of heads.

    Each rank has the whole residual stream of its stage. Ranks of different sequences add nothing to the rows
    of others, so that one sum joins the heads and the sequences.

    `first_cached` is the layer whose latents are first in the plan's cache.

    `split` is the kernels where KV is split by position, else None. Ranks of different positions have equal
    heads, and merge their attention before the output projection, of which each has `output_columns`.
    """

    config: ModelConfig
    local: ModelConfig
    indices: range
    first_cached: int
    layers: tuple[Layer, ...]
    kernels: Kernels
    latent_norm_eps: float
    links: GroupLinks
    split: ShareKernels | None
    output_columns: slice

    def run(self, x: torch.Tensor, plan: StagePlan, captured: Sequence[int]) -> Mapping[int, torch.Tensor]:
        """Run like `Stack.run`, over the layers of the stage; `captured` may name layers of other stages."""
        outputs: dict[int, torch.Tensor] = {}
        for index, layer in zip(self.indices, self.layers, strict=True):
            x += self.links.sum_in_stage(self._attention(x, layer, index, plan))
            x += self.links.sum_in_stage(self._feed_forward(x, layer, index))
            if index in captured:
                outputs[index] = x.clone()
        return outputs

    def _feed_forward(self, x: torch.Tensor, layer: Layer, index: int) -> torch.Tensor:
        normed = self.kernels.rms_norm(x, layer.post_norm, self.config.rms_norm_eps)
        run = self.kernels.moe if self.config.is_moe(index) else self.kernels.mlp
        return run(normed, layer.mlp, residual=torch.zeros_like(x))

    def _attention(self, x: torch.Tensor, layer: Layer, index: int, plan: StagePlan) -> torch.Tensor:
        """The rank's part of the attention's output [T, H]: its heads, at the rows of its sequences."""
        if plan.attention is None:
            return torch.zeros_like(x)
        normed = self.kernels.rms_norm(x[plan.rows], layer.input_norm, self.config.rms_norm_eps)
        mixed = self._mixed(normed, layer.attention, index, plan.attention)
        out = self.kernels.linear(mixed, layer.attention.o_proj)
        if len(out) == len(x):
            return out
        padded = torch.zeros_like(x)
        padded[plan.rows] = out
        return padded

    def _mixed(self, x: torch.Tensor, weights: Attention, index: int, plan: BatchPlan) -> torch.Tensor:
        """The attention over whole contexts, in the columns that the rank's output projection takes."""
        index -= self.first_cached
        q = store_and_query(x, weights, index, plan, self.kernels, self.local, self.latent_norm_eps)
        if self.split is None:
            return self.kernels.attend(q, weights.kv_b, index, plan, self.local)
        share = self.split.attend_share(q, weights.kv_b, index, plan, self.local)
        mixed = self.split.merge_shares(self.links.gather_shares(share), self.local)
        return mixed[:, self.output_columns]

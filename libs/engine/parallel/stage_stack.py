"""Runs the layers of one stage on one rank: the rank's part of each operation, then a sum over the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from libs.engine.kernels.interface import Kernels
from libs.engine.kernels.layer import Layer
from libs.engine.model.stack import attend_latents
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
    """

    config: ModelConfig
    local: ModelConfig
    indices: range
    layers: tuple[Layer, ...]
    kernels: Kernels
    latent_norm_eps: float
    links: GroupLinks

    def run(self, x: torch.Tensor, plan: StagePlan, captured: Sequence[int]) -> Mapping[int, torch.Tensor]:
        """As `Stack.run`, over the layers of the stage; `captured` may name layers of other stages."""
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
        mixed = attend_latents(
            normed,
            layer.attention,
            index,
            plan.attention,
            self.kernels,
            self.local,
            self.latent_norm_eps,
        )
        out = self.kernels.linear(mixed, layer.attention.o_proj)
        if len(out) == len(x):
            return out
        padded = torch.zeros_like(x)
        padded[plan.rows] = out
        return padded

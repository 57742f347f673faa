"""Runs the decoder's layers over the residual stream, operation by operation: the readable form.

The compiled kernels run the same operations in the same order within one call (`kernels/native_stack.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from libs.engine.kernels.interface import Kernels
from libs.engine.kernels.layer import Attention, Layer
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.plan import BatchPlan
from libs.engine.step.stop_flag import StepAborted, StopFlag

if TYPE_CHECKING:
    from libs.engine.kernels.gpu.triton_kernels import TritonKernels


class Stack(Protocol):
    def run(
        self, x: torch.Tensor, plan: BatchPlan, captured: Sequence[int], stop: StopFlag | None = None
    ) -> Mapping[int, torch.Tensor]:
        """Run all layers on x [T, H], the embedding, in place, and write the rows' latents into the cache.

        Returns the outputs [T, H] of the layers in `captured`. Raises StepAborted soon after `stop` was set;
        x and the rows' latents are then undefined.
        """
        ...


@dataclass(frozen=True, slots=True)
class PlainStack:
    """`latent_norm_eps` is the epsilon of the q and kv latent norms."""

    config: ModelConfig
    layers: tuple[Layer, ...]
    kernels: Kernels
    latent_norm_eps: float

    def run(
        self, x: torch.Tensor, plan: BatchPlan, captured: Sequence[int], stop: StopFlag | None = None
    ) -> Mapping[int, torch.Tensor]:
        outputs: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            if stop is not None and stop.is_set:
                raise StepAborted
            self._layer(x, layer, index, plan)
            if index in captured:
                outputs[index] = x.clone()
        return outputs

    def _layer(self, x: torch.Tensor, layer: Layer, index: int, plan: BatchPlan) -> None:
        kernels, config = self.kernels, self.config
        normed = kernels.rms_norm(x, layer.input_norm, config.rms_norm_eps)
        mixed = self._attention(normed, layer.attention, index, plan)
        kernels.linear(mixed, layer.attention.o_proj, residual=x)
        normed = kernels.rms_norm(x, layer.post_norm, config.rms_norm_eps)
        if config.is_moe(index):
            kernels.moe(normed, layer.mlp, residual=x)
        else:
            kernels.mlp(normed, layer.mlp, residual=x)

    def _attention(self, x: torch.Tensor, weights: Attention, index: int, plan: BatchPlan) -> torch.Tensor:
        """Multi-head latent attention: [T, H] -> [T, heads * v]."""
        q = store_and_query(x, weights, index, plan, self.kernels, self.config, self.latent_norm_eps)
        return self.kernels.attend(q, weights.kv_b, index, plan, self.config)


@dataclass(frozen=True, slots=True)
class FusedStack(PlainStack):
    """The stack of a device: one program adds the output of attention and norms the sum."""

    kernels: TritonKernels

    def _layer(self, x: torch.Tensor, layer: Layer, index: int, plan: BatchPlan) -> None:
        kernels, eps = self.kernels, self.config.rms_norm_eps
        mixed = self._attention(kernels.rms_norm(x, layer.input_norm, eps), layer.attention, index, plan)
        delta = kernels.linear(mixed, layer.attention.o_proj)
        normed = kernels.add_rms_norm(x, delta, layer.post_norm, eps)
        if self.config.is_moe(index):
            kernels.moe(normed, layer.mlp, residual=x)
        else:
            kernels.mlp(normed, layer.mlp, residual=x)


def store_and_query(
    x: torch.Tensor,
    weights: Attention,
    index: int,
    plan: BatchPlan,
    kernels: Kernels,
    config: ModelConfig,
    norm_eps: float,
) -> torch.Tensor:
    """Write the latents of the rows; return their queries [T, heads, qk_head_dim], rotated."""
    a = kernels.linear(x, weights.a_proj)
    q, kv_a = a[:, : -config.latent_width], a[:, -config.latent_width :]
    if weights.q_norm is not None:
        q = kernels.linear(kernels.rms_norm(q, weights.q_norm, norm_eps), weights.q_b)
    q = q.view(plan.n_rows, config.n_heads, config.qk_head_dim)
    kernels.rotate_queries(q, config.qk_rope_head_dim, plan.cos_sin)
    kernels.store_latent(kv_a, weights.kv_norm, norm_eps, index, plan)
    return q

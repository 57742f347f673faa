"""The operations of a decoder. Tests check that all implementations agree within rounding.

Activations are fp32 on the CPU: bf16 and INT4 are storage formats of weights and cache, widened when read.
On a CUDA device activations are bf16, and the residual stream and the logits stay fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.matrix import DenseMatrix
from libs.engine.model_spec.plan import BatchPlan
from libs.engine.model_spec.stored_matrix import Matrix, StoredMatrix

# A weight in the form of one implementation, opaque to others.
Packed = Any
# (gate, up, down) of one MLP: down(silu(gate(x)) * up(x)).
MlpMatrices = tuple[Matrix, Matrix, Matrix]


class Kernels(Protocol):
    """x is [T, width] with contiguous rows; T may be any number of at least 1. `residual` is fp32."""

    name: str
    device: torch.device
    dtype: torch.dtype  # of activations

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the memory that the kernels read: norms, the embedding, inputs."""
        ...

    def pack(self, matrix: Matrix) -> Packed:
        """A weight for `linear`."""
        ...

    def pack_kv_b(self, matrix: DenseMatrix | StoredMatrix, config: ModelConfig) -> Packed:
        """kv_b_proj [heads * (nope + v), kv_lora], rows interleaved per head, for `attend`."""
        ...

    def pack_mlp(self, matrices: MlpMatrices) -> Packed:
        """A weight for `mlp`."""
        ...

    def pack_moe(
        self,
        router: Matrix,
        correction_bias: torch.Tensor,
        experts: Iterable[MlpMatrices | None],
        shared: MlpMatrices | None,
        config: ModelConfig,
    ) -> Packed:
        """A weight for `moe`; correction_bias [E] fp32; `experts` is consumed one by one, in order.

        None stands for an expert of another rank, which adds nothing here; at least one is not None.
        """
        ...

    def linear(self, x: torch.Tensor, weight: Packed, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, cols] -> [T, rows], added into `residual` in place when one is given."""
        ...

    def logits(self, x: torch.Tensor, weight: Packed) -> torch.Tensor:
        """x [R, cols] -> [R, rows] fp32, without a rounding to the dtype of activations."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[T, width]; rows of x may be strided."""
        ...

    def rotate_queries(self, q: torch.Tensor, rope_dim: int, cos_sin: torch.Tensor) -> None:
        """Rotates the last `rope_dim` values of each head of q [T, heads, qk_head_dim] in place."""
        ...

    def store_latent(
        self, kv_a: torch.Tensor, norm: torch.Tensor, eps: float, layer: int, plan: BatchPlan
    ) -> None:
        """kv_a [T, kv_lora + rope]: writes normed latent | rotated key into the cache slots of the rows, but
        for rows whose slots are not in the plan's share.
        """
        ...

    def attend(
        self, q: torch.Tensor, kv_b: Packed, layer: int, plan: BatchPlan, config: ModelConfig
    ) -> torch.Tensor:
        """q [T, heads, qk_head_dim], rotated -> [T, heads * v_head_dim]; causal over each row's context."""
        ...

    def mlp(self, x: torch.Tensor, weights: Packed, residual: torch.Tensor) -> torch.Tensor:
        """Adds the MLP's output into `residual` and returns it."""
        ...

    def moe(self, x: torch.Tensor, weights: Packed, residual: torch.Tensor) -> torch.Tensor:
        """Adds routed plus shared experts' output into `residual` and returns it."""
        ...


@runtime_checkable
class ShareKernels(Kernels, Protocol):
    """Kernels that can attend to a part of each context."""

    def attend_share(
        self, q: torch.Tensor, kv_b: Packed, layer: int, plan: BatchPlan, config: ModelConfig
    ) -> torch.Tensor:
        """Attend like `attend`, over the plan's share of each context.

        Flat: values [T, heads, v_head_dim], then [T, heads] logs of the sums of exponentials of scores. A row
        that sees nothing has zeros, and -inf.
        """
        ...

    def merge_shares(self, shares: Sequence[torch.Tensor], config: ModelConfig) -> torch.Tensor:
        """The results of `attend_share` over all shares -> that of `attend` over the whole contexts."""
        ...

"""The Triton programs behind the `Kernels` interface; dense products are cuBLAS's, through torch.

The residual stream is fp32. Activations between programs have one dtype, bf16 on a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from libs.engine.kernels.gpu.device_plan import DevicePlan, upload
from libs.engine.kernels.gpu.expert_weights import ExpertWeights, int4_group, stack_dense, stack_experts
from libs.engine.kernels.gpu.grouped_gemm import combine, grouped_gemm
from libs.engine.kernels.gpu.kv_splits import KvSplits, choose_split_tokens, count_splits, upload_splits
from libs.engine.kernels.gpu.mla_decode import mla_decode
from libs.engine.kernels.gpu.mla_prefill import mla_prefill
from libs.engine.kernels.gpu.norm import rms_norm, swiglu
from libs.engine.kernels.gpu.rope import rotate_queries, store_latent
from libs.engine.kernels.gpu.router import choose_experts
from libs.engine.kernels.gpu.work_list import build_work_list, single_list
from libs.engine.kernels.interface import MlpMatrices, Packed
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.matrix import DenseMatrix
from libs.engine.model_spec.plan import BatchPlan
from libs.engine.model_spec.stored_matrix import Matrix, StoredMatrix

_INTERPRETED_PROCESSORS = 2


@dataclass(frozen=True, slots=True)
class _HeadProjections:
    """kv_b [heads * (nope + v), kv_lora]; its views uk [heads, nope, kv_lora] and uv [heads, v, kv_lora]."""

    kv_b: torch.Tensor
    uk: torch.Tensor
    uv: torch.Tensor


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """gate above up, and down."""

    gate_up: Packed
    down: Packed


@dataclass(frozen=True, slots=True)
class RoutedWeights:
    """`place_of` [E] i32: the place of an expert in the stacks, or -1 when another rank has it."""

    router: torch.Tensor
    correction_bias: torch.Tensor
    place_of: torch.Tensor
    n_held: int
    gate_up: ExpertWeights
    down: ExpertWeights
    shared: GatedWeights | None
    config: ModelConfig


class TritonKernels:
    """Kernels on `device`, with activations of `dtype`. One thread drives them."""

    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device = device
        self.dtype = dtype
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else _INTERPRETED_PROCESSORS
        )
        self._uploaded: tuple[BatchPlan, DevicePlan] | None = None
        self._split: tuple[BatchPlan, KvSplits] | None = None

    def count_splits(self, n_sequences: int, most_rows: int, n_heads: int) -> int:
        """The most splits of one sequence's KV in a batch of `n_sequences`."""
        return count_splits(n_sequences, most_rows, n_heads, self._processors)

    def bind(self, plan: BatchPlan, uploaded: DevicePlan, splits: KvSplits) -> None:
        """Run the next step, whose plan this is, on tensors that are on the device already."""
        self._uploaded = plan, uploaded
        self._split = plan, splits

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def pack(self, matrix: Matrix) -> Packed:
        return self._stacked((matrix,))

    def pack_kv_b(self, matrix: DenseMatrix | StoredMatrix, config: ModelConfig) -> Packed:
        kv_b = matrix.dequantised().to(self.device, self.dtype).contiguous()
        heads = kv_b.view(-1, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
        return _HeadProjections(
            kv_b, heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
        )

    def pack_mlp(self, matrices: MlpMatrices) -> Packed:
        gate, up, down = matrices
        return GatedWeights(self._stacked((gate, up)), self.pack(down))

    def pack_moe(
        self,
        router: Matrix,
        correction_bias: torch.Tensor,
        experts: Iterable[MlpMatrices | None],
        shared: MlpMatrices | None,
        config: ModelConfig,
    ) -> Packed:
        of_all = list(experts)  # those of a checkpoint are not read yet
        held = [expert for expert in of_all if expert]
        places = count()
        place_of = [next(places) if expert else -1 for expert in of_all]
        return RoutedWeights(
            router=router.dequantised().to(self.device),
            correction_bias=self.place(correction_bias),
            place_of=torch.tensor(place_of, dtype=torch.int32, device=self.device),
            n_held=len(held),
            gate_up=stack_experts([expert[:2] for expert in held], self.device, self.dtype),
            down=stack_experts([expert[2:] for expert in held], self.device, self.dtype),
            shared=self.pack_mlp(shared) if shared else None,
            config=config,
        )

    def linear(self, x: torch.Tensor, weight: Packed, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is None:
            return self._product(x, weight, self.dtype)
        return residual.add_(self._product(x, weight, residual.dtype))

    def logits(self, x: torch.Tensor, weight: Packed) -> torch.Tensor:
        return self._product(x, weight, torch.float32)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps, self.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds delta to x in place, and returns the norm of the sum."""
        return rms_norm(x, weight, eps, self.dtype, delta)

    def rotate_queries(self, q: torch.Tensor, rope_dim: int, cos_sin: torch.Tensor) -> None:
        if self._uploaded is not None and self._uploaded[0].cos_sin is cos_sin:
            cos_sin = self._uploaded[1].cos_sin
        rotate_queries(q, rope_dim, cos_sin.to(q.device))

    def store_latent(
        self, kv_a: torch.Tensor, norm: torch.Tensor, eps: float, layer: int, plan: BatchPlan
    ) -> None:
        store_latent(kv_a, norm, eps, plan.cache.pages[:, layer], self._on_device(plan))

    def attend(
        self, q: torch.Tensor, kv_b: Packed, layer: int, plan: BatchPlan, config: ModelConfig
    ) -> torch.Tensor:
        pages = plan.cache.pages[:, layer]
        if not len(plan.expanded):
            return self._decode(q, kv_b, pages, plan, config).flatten(1)
        out = q.new_empty(plan.n_rows, config.n_heads, config.v_head_dim)
        if len(plan.absorbed):
            rows = self._on_device(plan).absorbed_rows
            out[rows] = self._decode(q[rows], kv_b, pages, plan, config)
        for sequence in plan.expanded:
            rows_of = plan.rows_of(sequence)
            out[rows_of] = mla_prefill(
                q[rows_of],
                self._context(pages, plan, sequence),
                kv_b.kv_b,
                nope=config.qk_nope_head_dim,
                value=config.v_head_dim,
                scale=config.softmax_scale,
            ).to(out.dtype)
        return out.flatten(1)

    def mlp(self, x: torch.Tensor, weights: Packed, residual: torch.Tensor) -> torch.Tensor:
        return self.linear(swiglu(self.linear(x, weights.gate_up)), weights.down, residual)

    def moe(self, x: torch.Tensor, weights: Packed, residual: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(x.float(), weights.router)
        config = weights.config
        ids, scale = choose_experts(
            logits,
            weights.correction_bias,
            n_chosen=config.experts_per_token,
            n_group=config.n_group,
            topk_group=config.topk_group,
            normalises=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
        )
        expert_of_pair = self._experts_of_rows(weights.place_of[ids]).flatten()
        work = build_work_list(expert_of_pair, weights.n_held)
        hidden = grouped_gemm(
            x,
            weights.gate_up,
            work,
            pairs_per_row=config.experts_per_token,
            is_gated=True,
            out_dtype=self.dtype,
        )
        parts = grouped_gemm(hidden, weights.down, work, pair_weight=scale.flatten(), out_dtype=torch.float32)
        shared = None
        if weights.shared is not None:
            shared = self.linear(swiglu(self.linear(x, weights.shared.gate_up)), weights.shared.down)
        combine(parts, expert_of_pair, shared, residual)
        return residual

    def _stacked(self, matrices: tuple[Matrix, ...]) -> Packed:
        """INT4 for the grouped product, anything else as a matrix for cuBLAS."""
        if all(int4_group(matrix) for matrix in matrices):
            return stack_experts([matrices], self.device, self.dtype)
        return stack_dense(matrices, self.device, self.dtype)

    def _product(self, x: torch.Tensor, weight: Packed, out_dtype: torch.dtype) -> torch.Tensor:
        if isinstance(weight, ExpertWeights):
            x = x.to(self.dtype)
            return grouped_gemm(x, weight, single_list(x.shape[0], x.device), out_dtype=out_dtype)
        x = x.to(weight.dtype)
        if x.is_cuda and x.dtype != out_dtype:
            return torch.mm(x, weight.T, out_dtype=out_dtype)
        return torch.nn.functional.linear(x, weight).to(out_dtype)

    def _decode(
        self,
        q: torch.Tensor,
        kv_b: _HeadProjections,
        pages: torch.Tensor,
        plan: BatchPlan,
        config: ModelConfig,
    ) -> torch.Tensor:
        """q: of the rows of absorbed sequences alone."""
        nope = config.qk_nope_head_dim
        folded = torch.bmm(q[..., :nope].transpose(0, 1), kv_b.uk)
        mixed = mla_decode(
            folded.transpose(0, 1).contiguous(),
            q[..., nope:],
            pages,
            self._on_device(plan),
            self._splits(plan, config.n_heads),
            scale=config.softmax_scale,
        )
        return torch.bmm(mixed.transpose(0, 1), kv_b.uv.transpose(1, 2)).transpose(0, 1)

    def _context(self, pages: torch.Tensor, plan: BatchPlan, sequence: int) -> torch.Tensor:
        n_tokens = int(plan.context_len[sequence])
        n_blocks = -(-n_tokens // plan.cache.shape.block_tokens)
        used = self._on_device(plan).page_table[sequence, :n_blocks]
        return pages[used].flatten(0, 1)[:n_tokens].to(self.dtype)

    def _splits(self, plan: BatchPlan, n_heads: int) -> KvSplits:
        if self._split is None or self._split[0] is not plan:
            most_rows = int(np.diff(plan.query_start)[plan.absorbed].max())
            n_splits = self.count_splits(len(plan.absorbed), most_rows, n_heads)
            tokens = choose_split_tokens(plan.context_len, n_splits)
            self._split = plan, upload_splits(plan, tokens, self.device)
        return self._split[1]

    def _experts_of_rows(self, experts: torch.Tensor) -> torch.Tensor:
        """[T, k], with -1 for the padding of a step that is bound."""
        padding = None if self._uploaded is None else self._uploaded[1].is_padding
        if padding is None or len(padding) != len(experts):
            return experts
        return experts.masked_fill(padding[:, None], -1)

    def _on_device(self, plan: BatchPlan) -> DevicePlan:
        """Layers of one step share what was copied for the first."""
        if self._uploaded is None or self._uploaded[0] is not plan:
            self._uploaded = plan, upload(plan, self.device)
        return self._uploaded[1]

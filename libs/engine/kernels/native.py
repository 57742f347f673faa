"""The compiled kernels behind the `Kernels` interface: weights in panels, one C call per operation."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from libs.engine.kernels.interface import MlpMatrices, Packed
from libs.engine.kernels.native_types import ATTENTION, MATRIX, MLP, MOE, SLOTS, declare
from libs.engine.kernels.panel_memory import PanelMemory
from libs.engine.kernels.panels import PanelPacker, Panels, TensorMemory
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.matrix import DenseMatrix
from libs.engine.model_spec.plan import BatchPlan
from libs.engine.model_spec.stored_matrix import Matrix, StoredMatrix
from libs.engine.step.batch import Int32Array
from libs.engine.step.stop_flag import StepAborted

# One matrix in the checkpoint's form, or packed before.
_Packable = Matrix | Panels


@dataclass(frozen=True, slots=True)
class _Packed:
    """A C struct or array of structs, with the tensors that its pointers refer to."""

    struct: Any
    address: int
    rows: int
    keep: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _KvB:
    uk: _Packed
    uv: _Packed


class NativeKernels:
    """The compiled kernels with a pool of `threads` threads. Not thread-safe: operations share scratch."""

    name = "native"
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = declare(library)
        self.library_path = Path(library._name)
        self._packer = self.packer_into(PanelMemory())
        self._context = library.ss_context_new(threads)
        if not self._context:
            raise MemoryError("no memory for the kernels' context")

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._library.ss_context_free(self._context)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def packer_into(self, memory: TensorMemory) -> PanelPacker:
        """A packer of weights for these kernels into another memory than theirs."""
        return PanelPacker(self._library, memory)

    def pack(self, matrix: _Packable) -> Packed:
        return _array([self._packer.pack(matrix)])

    def pack_kv_b(
        self, matrix: DenseMatrix | StoredMatrix | tuple[Panels, Panels], config: ModelConfig
    ) -> Packed:
        if not isinstance(matrix, tuple):
            matrix = self._packer.pack_heads(matrix, config.qk_nope_head_dim, config.v_head_dim)
        return _KvB(*(_array([panels]) for panels in matrix))

    def pack_mlp(self, matrices: MlpMatrices) -> Packed:
        packed = [self.pack(matrix) for matrix in matrices]
        return _struct(MLP(*(part.address for part in packed)), 0, packed)

    def pack_moe(
        self,
        router: _Packable,
        correction_bias: torch.Tensor,
        experts: Iterable[MlpMatrices | None],
        shared: MlpMatrices | None,
        config: ModelConfig,
    ) -> Packed:
        held = [expert and [self._packer.pack(matrix) for matrix in expert] for expert in experts]
        absent = next([_without_data(part) for part in expert] for expert in held if expert)
        panels = [expert or absent for expert in held]
        gate, up, down = (_array([expert[part] for expert in panels]) for part in range(3))
        packed_router = self.pack(router)
        shared_mlp = MLP() if shared is None else (kept := self.pack_mlp(shared)).struct
        struct = MOE(
            router=packed_router.address,
            correction_bias=correction_bias.data_ptr(),
            n_experts=config.n_routed_experts,
            n_chosen=config.experts_per_token,
            n_group=config.n_group,
            topk_group=config.topk_group,
            norm_topk_prob=int(config.norm_topk_prob),
            gate=gate.address,
            up=up.address,
            down=down.address,
            shared=shared_mlp,
            routed_scaling_factor=config.routed_scaling_factor,
        )
        keep = [packed_router, correction_bias, gate, up, down, kept if shared is not None else None]
        return _struct(struct, 0, keep)

    def linear(self, x: torch.Tensor, weight: Packed, residual: torch.Tensor | None = None) -> torch.Tensor:
        n_rows = x.shape[0]
        out = x.new_empty(n_rows, weight.rows) if residual is None else residual
        self.check(
            self._library.ss_linear(
                self._context,
                x.data_ptr(),
                x.stride(0),
                n_rows,
                weight.address,
                out.data_ptr(),
                residual is not None,
            )
        )
        return out

    def logits(self, x: torch.Tensor, weight: Packed) -> torch.Tensor:
        return self.linear(x, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        n_rows, width = x.shape
        out = x.new_empty(n_rows, width)
        self._library.ss_rms_norm(
            self._context, x.data_ptr(), x.stride(0), weight.data_ptr(), n_rows, width, eps, out.data_ptr()
        )
        return out

    def rotate_queries(self, q: torch.Tensor, rope_dim: int, cos_sin: torch.Tensor) -> None:
        n_rows, n_heads, head_dim = q.shape
        self._library.ss_rotate_queries(
            self._context, q.data_ptr(), q.stride(0), n_rows, n_heads, head_dim, rope_dim, cos_sin.data_ptr()
        )

    def store_latent(
        self, kv_a: torch.Tensor, norm: torch.Tensor, eps: float, layer: int, plan: BatchPlan
    ) -> None:
        slots = slots_of(plan, norm.shape[0])
        arguments = (kv_a.data_ptr(), kv_a.stride(0), norm.data_ptr(), eps, _layer_base(plan, layer))
        self.check(self._library.ss_store_latent(self._context, ctypes.addressof(slots), *arguments))

    def attend(
        self, q: torch.Tensor, kv_b: Packed, layer: int, plan: BatchPlan, config: ModelConfig
    ) -> torch.Tensor:
        out = q.new_empty(plan.n_rows, config.n_heads * config.v_head_dim)
        self._attend(q, kv_b, layer, plan, config, out)
        return out

    def attend_share(
        self, q: torch.Tensor, kv_b: Packed, layer: int, plan: BatchPlan, config: ModelConfig
    ) -> torch.Tensor:
        n_lanes = plan.n_rows * config.n_heads
        share = q.new_empty(n_lanes * (config.v_head_dim + 1))
        self._attend(q, kv_b, layer, plan, config, share, share[n_lanes * config.v_head_dim :])
        return share

    def merge_shares(self, shares: Sequence[torch.Tensor], config: ModelConfig) -> torch.Tensor:
        v = config.v_head_dim
        n_lanes = len(shares[0]) // (v + 1)
        out = shares[0].new_empty(n_lanes // config.n_heads, config.n_heads * v)
        pointers = (ctypes.c_void_p * len(shares))(*(share.data_ptr() for share in shares))
        self._library.ss_merge_shares(
            self._context, ctypes.addressof(pointers), len(shares), n_lanes, v, out.data_ptr()
        )
        return out

    def _attend(
        self,
        q: torch.Tensor,
        kv_b: Packed,
        layer: int,
        plan: BatchPlan,
        config: ModelConfig,
        out: torch.Tensor,
        log_sums: torch.Tensor | None = None,
    ) -> None:
        layer_base = _layer_base(plan, layer) + _share_offset(plan)
        for sequences, function in (
            (plan.absorbed, self._library.ss_attend_absorbed),
            (plan.expanded, self._library.ss_attend_expanded),
        ):
            if len(sequences):
                a = attention_of(plan, sequences, config)
                a.q, a.q_stride, a.out = q.data_ptr(), q.stride(0), out.data_ptr()
                a.uk, a.uv, a.layer_base = kv_b.uk.address, kv_b.uv.address, layer_base
                a.log_sums = None if log_sums is None else log_sums.data_ptr()
                self.check(function(self._context, ctypes.addressof(a)))

    def mlp(self, x: torch.Tensor, weights: Packed, residual: torch.Tensor) -> torch.Tensor:
        arguments = (weights.address, x.data_ptr(), x.shape[0], residual.data_ptr())
        self.check(self._library.ss_mlp(self._context, *arguments))
        return residual

    def moe(self, x: torch.Tensor, weights: Packed, residual: torch.Tensor) -> torch.Tensor:
        arguments = (weights.address, x.data_ptr(), x.shape[0], residual.data_ptr())
        self.check(self._library.ss_moe(self._context, *arguments))
        return residual

    def run_stack(self, stack: int, step: int) -> None:
        """Run the layers, given the addresses of a STACK and a STEP.

        Raises StepAborted when `stop` was set.
        """
        status = self._library.ss_run_stack(self._context, stack, step)
        if status > 0:
            raise StepAborted
        self.check(status)

    def draft_chain(self, head: int, contexts: int, n: int, n_drafts: int, least: float) -> None:
        """Draft for `n` contexts, given the addresses of a DRAFT_HEAD and of DRAFT_CONTEXTs."""
        self.check(self._library.ss_draft_chain(self._context, head, contexts, n, n_drafts, least))

    @staticmethod
    def check(status: int) -> None:
        if status:
            raise MemoryError("no memory for the kernels' scratch")


def slots_of(plan: BatchPlan, lora: int) -> Any:
    """The SLOTS of a plan. The plan must outlive them."""
    shape = plan.cache.shape
    return SLOTS(
        n_rows=plan.n_rows,
        lora=lora,
        rope=shape.width - lora,
        cos_sin=plan.cos_sin.data_ptr(),
        page_of_row=plan.page_of_row.ctypes.data,
        offset_of_row=plan.offset_of_row.ctypes.data,
        page_bytes=shape.page_bytes,
        is_bf16=shape.kv_dtype == "bfloat16",
    )


def attention_of(plan: BatchPlan, sequences: Int32Array, config: ModelConfig) -> Any:
    """The ATTENTION over some sequences of a plan, without the fields that differ between layers."""
    shape, slots = plan.cache.shape, plan.share.slots(plan.cache.shape.block_tokens)
    return ATTENTION(
        n_heads=config.n_heads,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        lora=config.kv_lora_rank,
        v=config.v_head_dim,
        page_bytes=shape.page_bytes,
        block_tokens=slots.stop - slots.start,
        is_bf16=shape.kv_dtype == "bfloat16",
        query_start=plan.query_start.ctypes.data,
        context_len=plan.context_len.ctypes.data,
        visible=plan.visible.ctypes.data,
        page_table=plan.page_table.ctypes.data,
        table_stride=plan.page_table.shape[1],
        sequences=sequences.ctypes.data,
        n_sequences=len(sequences),
        scale=config.softmax_scale,
    )


def _layer_base(plan: BatchPlan, layer: int) -> int:
    shape = plan.cache.shape
    return plan.cache.address + layer * (shape.page_bytes // shape.n_layers)


def _share_offset(plan: BatchPlan) -> int:
    """Bytes from a layer's first slot of a page to the first one of the plan's share."""
    shape = plan.cache.shape
    slot_bytes = shape.page_bytes // shape.n_layers // shape.block_tokens
    return int(plan.share.slots(shape.block_tokens).start) * slot_bytes


def _array(matrices: Sequence[Panels | MATRIX]) -> _Packed:
    structs = [
        struct for part in matrices for struct in ([part] if isinstance(part, MATRIX) else part.structs())
    ]
    array = (MATRIX * len(structs))(*structs)
    return _struct(array, structs[0].rows, matrices)


def _without_data(panels: Panels) -> MATRIX:
    """The shape of a matrix whose values another rank has."""
    (struct,) = panels.structs()
    return MATRIX(None, None, struct.rows, struct.cols, struct.kind, 0, struct.group, 0)


def _struct(struct: Any, rows: int, keep: Iterable[Any]) -> _Packed:
    return _Packed(struct, ctypes.addressof(struct), rows, tuple(keep))

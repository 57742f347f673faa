"""The reference implementation in plain torch, which tests compare the compiled kernels with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from libs.engine.kernels.interface import MlpMatrices, Packed
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.matrix import DenseMatrix
from libs.engine.model_spec.moe import route
from libs.engine.model_spec.plan import BatchPlan
from libs.engine.model_spec.rope import rotate
from libs.engine.model_spec.stored_matrix import Matrix, StoredMatrix


@dataclass(frozen=True, slots=True)
class _KvProjection:
    """kv_b_proj split by head: uk [heads, nope, kv_lora], uv [heads, v, kv_lora], fp32."""

    uk: torch.Tensor
    uv: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Mlp:
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Moe:
    router: torch.Tensor
    correction_bias: torch.Tensor
    experts: tuple[_Mlp | None, ...]  # None: another rank has it
    shared: _Mlp | None
    config: ModelConfig


class TorchKernels:
    """Kernels in plain torch. `pack` widens weights to fp32 once."""

    name = "torch"
    device = torch.device("cpu")
    dtype = torch.float32

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def pack(self, matrix: Matrix) -> Packed:
        return matrix.dequantised().contiguous()

    def pack_kv_b(self, matrix: DenseMatrix | StoredMatrix, config: ModelConfig) -> Packed:
        nope = config.qk_nope_head_dim
        per_head = matrix.dequantised().view(-1, nope + config.v_head_dim, config.kv_lora_rank)
        return _KvProjection(per_head[:, :nope].contiguous(), per_head[:, nope:].contiguous())

    def pack_mlp(self, matrices: MlpMatrices) -> Packed:
        return _Mlp(*(self.pack(matrix) for matrix in matrices))

    def pack_moe(
        self,
        router: Matrix,
        correction_bias: torch.Tensor,
        experts: Iterable[MlpMatrices | None],
        shared: MlpMatrices | None,
        config: ModelConfig,
    ) -> Packed:
        packed = tuple(expert and self.pack_mlp(expert) for expert in experts)
        shared_mlp = None if shared is None else self.pack_mlp(shared)
        return _Moe(self.pack(router), correction_bias, packed, shared_mlp, config)

    def linear(self, x: torch.Tensor, weight: Packed, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, weight)
        return y if residual is None else residual.add_(y)

    def logits(self, x: torch.Tensor, weight: Packed) -> torch.Tensor:
        return self.linear(x, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    def rotate_queries(self, q: torch.Tensor, rope_dim: int, cos_sin: torch.Tensor) -> None:
        q[..., -rope_dim:] = rotate(q[..., -rope_dim:], cos_sin)

    def store_latent(
        self, kv_a: torch.Tensor, norm: torch.Tensor, eps: float, layer: int, plan: BatchPlan
    ) -> None:
        latent, key = kv_a[:, : norm.shape[0]], kv_a[:, norm.shape[0] :]
        rows = torch.cat((self.rms_norm(latent, norm, eps), rotate(key, plan.cos_sin)), dim=1)
        pages = plan.cache.pages[:, layer]
        page, offset = torch.from_numpy(plan.page_of_row), torch.from_numpy(plan.offset_of_row)
        is_held = page >= 0
        pages[page[is_held], offset[is_held]] = rows[is_held].to(pages.dtype)

    def attend(
        self, q: torch.Tensor, kv_b: Packed, layer: int, plan: BatchPlan, config: ModelConfig
    ) -> torch.Tensor:
        out = q.new_empty(plan.n_rows, config.n_heads, config.v_head_dim)
        for form, sequences in ((_absorbed, plan.absorbed), (_expanded, plan.expanded)):
            for sequence in sequences:
                rows = plan.rows_of(sequence)
                context = _context(plan, layer, sequence)
                out[rows] = form(q[rows], context, _hidden(plan, rows, context), kv_b, config)
        return out.flatten(1)

    def attend_share(
        self, q: torch.Tensor, kv_b: Packed, layer: int, plan: BatchPlan, config: ModelConfig
    ) -> torch.Tensor:
        out = q.new_empty(plan.n_rows, config.n_heads, config.v_head_dim)
        log_sums = q.new_empty(plan.n_rows, config.n_heads)
        for sequence in range(len(plan.context_len)):
            rows = plan.rows_of(sequence)
            context = _context(plan, layer, sequence)
            hidden = _hidden(plan, rows, context)
            scores = _scores(q[rows], context, hidden, kv_b, config)
            log_sums[rows] = scores.logsumexp(-1).T
            # The softmax of a row that sees nothing is NaN. That of scores that overflow is, too, and stays.
            probabilities = scores.softmax(-1).masked_fill(hidden, 0.0)
            out[rows] = _mix(probabilities, context, kv_b, config)
        return torch.cat((out.flatten(), log_sums.flatten()))

    def merge_shares(self, shares: Sequence[torch.Tensor], config: ModelConfig) -> torch.Tensor:
        n_lanes = len(shares[0]) // (config.v_head_dim + 1)
        log_sums = torch.stack([share[-n_lanes:] for share in shares])
        weights = log_sums.softmax(0).unsqueeze(-1)
        values = torch.stack([share[:-n_lanes].view(n_lanes, -1) for share in shares])
        return (values * weights).sum(0).view(-1, config.n_heads * config.v_head_dim)

    def mlp(self, x: torch.Tensor, weights: Packed, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(_mlp(x, weights))

    def moe(self, x: torch.Tensor, weights: Packed, residual: torch.Tensor) -> torch.Tensor:
        config = weights.config
        ids, scale = route(F.linear(x, weights.router), weights.correction_bias, config)
        by_expert = ids.flatten().argsort(stable=True)
        token_of = by_expert // config.experts_per_token
        counts = ids.flatten().bincount(minlength=config.n_routed_experts).tolist()
        inputs = torch.split(x[token_of], counts)
        pairs = zip(inputs, weights.experts, strict=True)
        outputs = [_mlp(rows, e) if e else torch.zeros_like(rows) for rows, e in pairs if len(rows)]
        by_slot = torch.empty_like(x).repeat(config.experts_per_token, 1)
        by_slot[by_expert] = torch.cat(outputs)
        mixed = (by_slot.view(*scale.shape, -1) * scale.unsqueeze(-1)).sum(1)
        if weights.shared is not None:
            mixed += _mlp(x, weights.shared)
        return residual.add_(mixed)


def _mlp(x: torch.Tensor, weights: _Mlp) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, weights.gate)) * F.linear(x, weights.up), weights.down)


def _context(plan: BatchPlan, layer: int, sequence: int) -> torch.Tensor:
    """[context_len, kv_lora + rope] fp32, gathered from the plan's share of the pages of one sequence."""
    slots = plan.share.slots(plan.cache.shape.block_tokens)
    n_tokens = int(plan.context_len[sequence])
    n_blocks = -(-n_tokens // (slots.stop - slots.start))
    pages = torch.from_numpy(plan.page_table[sequence, :n_blocks].copy()).long()
    return plan.cache.pages[:, layer, slots][pages].flatten(0, 1)[:n_tokens].float()


def _hidden(plan: BatchPlan, rows: slice, context: torch.Tensor) -> torch.Tensor:
    """[rows, context]: what the rows do not attend to."""
    return torch.arange(len(context)) >= torch.from_numpy(plan.visible[rows]).unsqueeze(1)


def _absorbed(
    q: torch.Tensor, context: torch.Tensor, hidden: torch.Tensor, kv_b: _KvProjection, config: ModelConfig
) -> torch.Tensor:
    """Multi-query attention over the latents themselves: kv_b is folded into the query and the output."""
    return _mix(_scores(q, context, hidden, kv_b, config).softmax(-1), context, kv_b, config)


def _scores(
    q: torch.Tensor, context: torch.Tensor, hidden: torch.Tensor, kv_b: _KvProjection, config: ModelConfig
) -> torch.Tensor:
    """[heads, rows, context]; -inf where a row does not attend."""
    q_nope, q_rope = q[..., : config.qk_nope_head_dim], q[..., config.qk_nope_head_dim :]
    query = torch.cat((torch.einsum("thd,hdl->thl", q_nope, kv_b.uk), q_rope), dim=-1)
    scores = torch.einsum("thw,cw->htc", query, context) * config.softmax_scale
    return scores.masked_fill(hidden, float("-inf"))


def _mix(
    probabilities: torch.Tensor, context: torch.Tensor, kv_b: _KvProjection, config: ModelConfig
) -> torch.Tensor:
    """[heads, rows, context] -> values [rows, heads, v]."""
    mixed = torch.einsum("htc,cl->thl", probabilities, context[:, : config.kv_lora_rank])
    return torch.einsum("thl,hvl->thv", mixed, kv_b.uv)


def _expanded(
    q: torch.Tensor, context: torch.Tensor, hidden: torch.Tensor, kv_b: _KvProjection, config: ModelConfig
) -> torch.Tensor:
    """Multi-head attention over keys and values expanded from the latents."""
    latent, k_rope = context[:, : config.kv_lora_rank], context[:, config.kv_lora_rank :]
    k_nope = torch.einsum("cl,hdl->hcd", latent, kv_b.uk)
    values = torch.einsum("cl,hvl->hcv", latent, kv_b.uv)
    keys = torch.cat((k_nope, k_rope.expand(config.n_heads, -1, -1)), dim=-1)
    if _may_overflow(q, keys):  # torch's attention gives 0 for a row whose scores are all -inf
        scores = torch.einsum("thd,hcd->htc", q, keys) * config.softmax_scale
        return torch.einsum("htc,hcv->thv", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
    mixed = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=~hidden, scale=config.softmax_scale
    )
    return mixed[0].transpose(0, 1)


def _may_overflow(q: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether a score may be infinite, by the largest values: one pass over the keys."""
    largest = [max(-float(low), float(high)) for low, high in (q.aminmax(), keys.aminmax())]
    return largest[0] * largest[1] * keys.shape[-1] > torch.finfo(torch.float32).max

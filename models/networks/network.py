"""The trainable network: MLA in expanded form, YaRN, sigmoid `noaux_tc` routing, a shared expert.

The network is for training a few million parameters on a CPU: whole documents padded to one length, experts
grouped by index, no cache. Parameter names are those of the checkpoint, except that the experts of a layer
are stacked: `mlp.experts.gate_up` [E, 2I, H] and `mlp.experts.down` [E, H, I].
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.networks.architecture import Architecture
from models.networks.quantize import fake_quantize, round_bfloat16


def yarn_inverse_frequencies(a: Architecture) -> Tensor:
    """Rotations per position [rope_dim / 2], fp32 (DeepSeek YaRN: ramp between scaled and unscaled)."""
    dim = a.qk_rope_head_dim
    base = a.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if a.rope_factor <= 1:
        return base.float()

    def corrected(rotations: float) -> float:
        span = a.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(span) / (2 * math.log(a.rope_theta))

    low = max(math.floor(corrected(a.rope_beta_fast)), 0)
    high = float(min(math.ceil(corrected(a.rope_beta_slow)), dim - 1))
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return (base / a.rope_factor * ramp + base * (1 - ramp)).float()


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x0, x1), (x2, x3), ... of `x` [..., L, D] by cos/sin [L, D / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), round_bfloat16(self.weight), self.eps)


class Linear(nn.Module):
    """A matrix [out, in] without bias. Its weight is rounded to bf16 at each use."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * n_in**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, round_bfloat16(self.weight))


class TrainableAttention(nn.Module):
    """Multi-head latent attention, expanded: the latent is turned into keys and values per head."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        q_out = a.num_attention_heads * a.qk_head_dim
        if a.q_lora_rank is None:
            self.q_proj = Linear(a.hidden_size, q_out)
        else:
            self.q_a_proj = Linear(a.hidden_size, a.q_lora_rank)
            self.q_a_layernorm = RMSNorm(a.q_lora_rank, 1e-6)
            self.q_b_proj = Linear(a.q_lora_rank, q_out)
        self.kv_a_proj_with_mqa = Linear(a.hidden_size, a.kv_lora_rank + a.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(a.kv_lora_rank, 1e-6)
        kv_out = a.num_attention_heads * (a.qk_nope_head_dim + a.v_head_dim)
        self.kv_b_proj = Linear(a.kv_lora_rank, kv_out)
        self.o_proj = Linear(a.num_attention_heads * a.v_head_dim, a.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, L, H] -> [B, L, H], causal within each row."""
        a = self.a
        b, n, _ = x.shape
        heads = a.num_attention_heads
        q = self.q_proj(x) if a.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(b, n, heads, a.qk_head_dim).transpose(1, 2)
        q_nope, q_rope = q.split([a.qk_nope_head_dim, a.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([a.kv_lora_rank, a.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, n, heads, -1).transpose(1, 2)
        k_nope, v = kv.split([a.qk_nope_head_dim, a.v_head_dim], dim=-1)
        k_rope = rotate_interleaved(k_rope.unsqueeze(1), cos, sin).expand(-1, heads, -1, -1)
        q = torch.cat((q_nope, rotate_interleaved(q_rope, cos, sin)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=a.softmax_scale)
        return cast(Tensor, self.o_proj(out.transpose(1, 2).reshape(b, n, -1)))


class TrainableMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Gate(nn.Module):
    """Expert scores. The correction bias affects the choice of experts, not their weights."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(a.n_routed_experts, a.hidden_size) * a.hidden_size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(a.n_routed_experts))
        self.register_buffer("load", torch.zeros(a.n_routed_experts), persistent=False)
        self.load_lock = threading.Lock()


class Experts(nn.Module):
    """All routed experts of a layer, stacked."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        e, h, i = a.n_routed_experts, a.hidden_size, a.moe_intermediate_size
        self.gate_up = nn.Parameter(torch.randn(e, 2 * i, h) * h**-0.5)
        self.down = nn.Parameter(torch.randn(e, h, i) * i**-0.5)


class MoE(nn.Module):
    """Top-k of sigmoid(gate(x)) + bias, weights renormalised and scaled, plus the shared expert."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.gate = Gate(a)
        self.experts = Experts(a)
        self.shared_experts = TrainableMlp(a.hidden_size, a.moe_intermediate_size * a.n_shared_experts)
        self.quantized = False

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> (expert ids [T, k], weights [T, k])."""
        scores = torch.sigmoid(F.linear(x, round_bfloat16(self.gate.weight)))
        with torch.no_grad():
            chosen = scores + self.gate.e_score_correction_bias
            ids = chosen.topk(self.a.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.a.routed_scaling_factor
        return ids, weights

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        flat = x.reshape(-1, shape[-1])
        ids, weights = self.route(flat)
        gate_up: Tensor = self.experts.gate_up
        down: Tensor = self.experts.down
        if self.quantized:
            gate_up, down = fake_quantize(gate_up), fake_quantize(down)
        k = self.a.num_experts_per_tok
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self.a.n_routed_experts)
        if self.training:
            with self.gate.load_lock:
                self.gate.load += counts
        rows = order // k
        parts = []
        for e, part in enumerate(torch.split(flat[rows], counts.tolist())):
            gate, up = F.linear(part, gate_up[e]).chunk(2, dim=-1)
            parts.append(F.linear(F.silu(gate) * up, down[e]))
        weighted = torch.cat(parts) * weights.flatten()[order].unsqueeze(-1)
        out = self.shared_experts(flat).index_add(0, rows, weighted)
        return cast(Tensor, out.view(shape))


class TrainableLayer(nn.Module):
    """Pre-norm attention and MLP (or MoE), each added to the residual stream."""

    def __init__(self, a: Architecture, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(a.hidden_size, a.rms_norm_eps)
        self.self_attn = TrainableAttention(a)
        self.post_attention_layernorm = RMSNorm(a.hidden_size, a.rms_norm_eps)
        dense = index < a.first_k_dense_replace
        self.mlp: nn.Module = TrainableMlp(a.hidden_size, a.intermediate_size) if dense else MoE(a)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


@dataclass(frozen=True, slots=True)
class NetworkOutput:
    """`hidden` [B, L, H] after the final norm; `streams[i]` [B, L, H] = residual stream after layer i."""

    hidden: Tensor
    streams: tuple[Tensor, ...]


class Network(nn.Module):
    """The language model. `forward` gives hidden states; `logits` turns chosen rows into scores."""

    inverse_frequencies: Tensor

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.embed_tokens = nn.Embedding(a.vocab_size, a.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(TrainableLayer(a, i) for i in range(a.num_hidden_layers))
        self.norm = RMSNorm(a.hidden_size, a.rms_norm_eps)
        self.lm_head = None if a.tie_word_embeddings else Linear(a.hidden_size, a.vocab_size)
        for layer in self.layers:
            for name, p in layer.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down")):
                    nn.init.normal_(p, std=0.1 * p.shape[-1] ** -0.5)
        self.register_buffer("inverse_frequencies", yarn_inverse_frequencies(a), persistent=False)

    def moe_layers(self) -> list[MoE]:
        return [m for m in self.modules() if isinstance(m, MoE)]

    def set_quantized(self, quantized: bool) -> None:
        """Switches INT4 rounding of the routed experts on or off."""
        for moe in self.moe_layers():
            moe.quantized = quantized

    def forward(self, token_ids: Tensor) -> NetworkOutput:
        """token_ids [B, L] (int64), every row one document from position 0, padded on the right."""
        angles = torch.outer(torch.arange(token_ids.shape[1]).float(), self.inverse_frequencies)
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(token_ids, round_bfloat16(self.embed_tokens.weight))
        streams = []
        for layer in self.layers:
            x = layer(x, cos, sin)
            streams.append(x)
        return NetworkOutput(hidden=self.norm(x), streams=tuple(streams))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] after the final norm -> scores [..., vocab], fp32."""
        if self.lm_head is None:
            return F.linear(hidden, round_bfloat16(self.embed_tokens.weight))
        return cast(Tensor, self.lm_head(hidden))

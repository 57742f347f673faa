"""The EAGLE-3 draft head as a trainable module, unrolled over several draft steps.

Row i joins the target's feature f_i with token i + 1 at position i and predicts token i + 2. In step s of the
unrolled loss a row uses its own previous hidden state and the next token, as in drafting. Its keys are the
step-0 keys of earlier rows and the row's own keys of steps 1..s. The layout is that of the public Llama-type
heads: `midlayer.*`, `fc`, `norm`, `lm_head`; RoPE in half layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from models.networks.network import Linear, RMSNorm, TrainableMlp


@dataclass(frozen=True, slots=True)
class EagleShape:
    """Sizes of the head; `target_*` are those of the language model."""

    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    output_layer_ids: tuple[int, int, int]

    def to_config(self, *, bos_token_id: int, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
        """`config.json` of the public heads; `eagle_aux_hidden_state_layer_ids` are output indices."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "draft_vocab_size": self.vocab_size,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.output_layer_ids),
                "use_aux_hidden_state": True,
            },
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_bias": False,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": 1,
            "num_key_value_heads": self.num_attention_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "target_hidden_size": self.hidden_size,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EagleShape:
        """Reads back what `to_config` wrote."""
        ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        keys = [key for key in cls.__dataclass_fields__ if key != "output_layer_ids"]
        return cls(**{key: config[key] for key in keys}, output_layer_ids=tuple(ids))


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x_i, x_{i + D/2}) of `x` [..., L, D] by cos/sin [L, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class HeadAttention(nn.Module):
    """Projections of the draft layer; its input is 2H wide."""

    def __init__(self, s: EagleShape) -> None:
        super().__init__()
        width = s.num_attention_heads * s.head_dim
        self.q_proj = Linear(2 * s.hidden_size, width)
        self.k_proj = Linear(2 * s.hidden_size, width)
        self.v_proj = Linear(2 * s.hidden_size, width)
        self.o_proj = Linear(width, s.hidden_size)


class MidLayer(nn.Module):
    """The one decoder layer of the head."""

    def __init__(self, s: EagleShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.hidden_norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = HeadAttention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = TrainableMlp(s.hidden_size, s.intermediate_size)


class TrainableEagleHead(nn.Module):
    """The head. It has no embedding; the caller passes embeddings of the target."""

    def __init__(self, s: EagleShape) -> None:
        super().__init__()
        self.s = s
        self.fc = Linear(3 * s.hidden_size, s.hidden_size)
        self.midlayer = MidLayer(s)
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.lm_head = Linear(s.hidden_size, s.vocab_size)

    def unroll(self, features: Tensor, embedded: Tensor, rows: Tensor, steps: int) -> list[Tensor]:
        """Hidden states of `steps` draft steps from chosen rows of one document, before the final norm.

        features [L, 3H] of the target's positions 0..L-1; embedded [P, H]: the embedding of the token at
        position p in row p, P >= L + 1 and P > max(rows) + steps; rows [M]: positions that draft.
        Result s [M, H]: entry m predicts the token at rows[m] + 2 + s.
        """
        n = features.shape[0]
        cos, sin = self._angles(n + steps)
        fused = self.fc(features)
        x = self._joined(fused, embedded[1 : n + 1])
        k, v = self._heads(self.midlayer.self_attn.k_proj, x), self._heads(self.midlayer.self_attn.v_proj, x)
        k = rotate_half(k, cos[:n], sin[:n])
        visible = torch.arange(n) <= rows.unsqueeze(1)
        hidden, own = fused[rows], list[tuple[Tensor, Tensor]]()
        out = []
        for step in range(steps):
            at = rows + step
            x = self._joined(hidden, embedded[at + 1])
            q = rotate_half(self._heads(self.midlayer.self_attn.q_proj, x), cos[at], sin[at])
            if step:
                own_k = rotate_half(self._heads(self.midlayer.self_attn.k_proj, x), cos[at], sin[at])
                own.append((own_k, self._heads(self.midlayer.self_attn.v_proj, x)))
            hidden = self._finish(hidden, self._attend(q, k, v, visible, own))
            out.append(hidden)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] as `unroll` gives it -> scores [..., draft vocab]."""
        return cast(Tensor, self.lm_head(self.norm(hidden)))

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        dim = self.s.head_dim
        inverse = self.s.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
        return angles.cos(), angles.sin()

    def _joined(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The layer's input [n, 2H]: the token's embedding, then the hidden state, each normed."""
        layer = self.midlayer
        return torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), dim=-1)

    def _heads(self, projection: Linear, x: Tensor) -> Tensor:
        """[n, 2H] -> [heads, n, head_dim]"""
        projected: Tensor = projection(x)
        return projected.view(-1, self.s.num_attention_heads, self.s.head_dim).transpose(0, 1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, own: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """q [heads, M, D] over step-0 keys [heads, L, D] where `visible` [M, L], and over the rows' own."""
        q = q * self.s.head_dim**-0.5
        scores = [(q @ k.mT).masked_fill(~visible, float("-inf"))]
        scores += [(q * own_k).sum(-1, keepdim=True) for own_k, _ in own]
        weights = torch.cat(scores, dim=-1).softmax(-1)
        n = k.shape[1]
        mixed = weights[..., :n] @ v
        for index, (_, own_v) in enumerate(own):
            mixed = mixed + weights[..., n + index, None] * own_v
        return mixed

    def _finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        layer = self.midlayer
        x = residual + layer.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
        return cast(Tensor, x + layer.mlp(layer.post_attention_layernorm(x)))

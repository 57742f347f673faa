"""Initial weights of the draft head with which copying works before training.

The head's one layer is enough to copy: row j pairs the target's features of position j, which contain token
j, with token j + 1. A row attends to an earlier position with a similar token, and drafts the token that
followed there. All weights are trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.networks.eagle_network import TrainableEagleHead
from models.networks.network import Network

_LOW_GAIN = 0.6
_HIGH_GAIN = 0.1
_MATCH_STRENGTH = 2.5
_COPY_GAIN = 2.0
_LOGIT_GAIN = 0.15
# Rotary pairs slower than this hardly rotate within the drafter's window, so they can compare tokens.
_SLOW = 0.005


@torch.no_grad()
def write_draft_circuit(head: TrainableEagleHead, target: Network) -> None:
    """Overwrite `fc`, attention and `lm_head` of a new head."""
    s = head.s
    size = s.hidden_size
    centred = target.embed_tokens.weight - target.embed_tokens.weight.mean(0)
    head.fc.weight.mul_(_HIGH_GAIN)
    head.fc.weight[:, :size] = torch.eye(size) * _LOW_GAIN
    attention = head.midlayer.self_attn
    heads = (s.num_attention_heads, s.head_dim)
    slow = _slow_dimensions(s.head_dim, s.rope_theta)
    query = attention.q_proj.weight.view(*heads, 2 * size)
    key = attention.k_proj.weight.view(*heads, 2 * size)
    # The comparison excludes the mean of all tokens, which is common to all of them.
    common = torch.nn.functional.normalize(target.embed_tokens.weight.mean(0), dim=0)
    for index in range(s.num_attention_heads):
        basis = torch.linalg.qr(torch.randn(size, len(slow))).Q.T
        basis = basis - torch.outer(basis @ common, common)
        query[index] *= 0.2
        key[index] *= 0.2
        query[index, slow, :size] = basis * _MATCH_STRENGTH
        key[index, slow, size:] = basis * _MATCH_STRENGTH
    width = s.num_attention_heads * s.head_dim
    basis = torch.linalg.qr(torch.randn(size, size)).Q[:width]
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[: len(basis), :size] = basis
    attention.o_proj.weight.zero_()
    attention.o_proj.weight[:, : len(basis)] = basis.T * _COPY_GAIN
    score = target.embed_tokens if target.lm_head is None else target.lm_head
    head.lm_head.weight.copy_(score.weight * 0.5 + centred * _LOGIT_GAIN)


def _slow_dimensions(head_dim: int, theta: float) -> Tensor:
    """Both dimensions of every slow rotary pair (half layout: i and i + head_dim / 2)."""
    pairs = torch.arange(head_dim // 2)
    slow = pairs[theta ** (-2 * pairs / head_dim) < _SLOW]
    return torch.cat((slow, slow + head_dim // 2))

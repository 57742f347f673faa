"""Initial weights with an induction circuit, so that copying works before training (arXiv 2209.11895).

To copy "482135" a model must find an earlier occurrence of its last two tokens, and continue from there.
Heads of layer 0 attend one to four positions back and copy the tokens there. Four heads of layer 1 compare
these with the last two tokens, and copy the token that followed. From random weights small models need tens
of millions of tokens to learn this; a run of an hour has a few million. All other weights are random, and all
weights are trained.

Directions of the residual stream at the start: one constant in every token, then those that layer 0 writes
(`Directions`), then the subspace of the embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from models.networks.architecture import Architecture
from models.networks.network import Network, TrainableAttention, TrainableLayer

_EMBEDDING_STD = 0.5
_CONSTANT_NORM = 6.0
# Two heads attend further back, because the tokens before a value, such as its key, identify it.
_KEY_POSITIONS = (3, 4)
_KEY_GAIN = 0.4
_MATCH_HEADS = 4
# The logit of the wanted position over its neighbours is about this squared times the softmax scale.
_BACK_STRENGTH = 6.5
# Frequencies of the heads that attend back. With only the fastest ones, positions a few periods apart look
# alike, and heads that work within 1,000 tokens fail within 3,000.
_ROTATED_PAIRS = 6
_CARRIED_GAIN = 0.6
_MATCH_STRENGTH = 2.0
_VALUE_GAIN = 2.0
_LOGIT_GAIN = 0.2


@dataclass(frozen=True, slots=True)
class Directions:
    """Orthonormal rows [n, H]. `token`, `context` and `read`: parts of an embedding.

    Layer 0 writes `token` and `context` of the previous token to `token_1` and `context_1`, and `context` of
    the one before that to `context_2`. It writes `token` of earlier ones to `keys`. The matching heads copy
    `read`.
    """

    constant: Tensor
    token_1: Tensor
    context_1: Tensor
    context_2: Tensor
    keys: tuple[Tensor, ...]
    embedding: Tensor
    token: Tensor
    context: Tensor
    read: Tensor


def _sample_directions(a: Architecture) -> Directions:
    n_token, n_context, n_key = 2 * a.v_head_dim // 3, a.v_head_dim // 3, a.v_head_dim // 3
    basis = torch.linalg.qr(torch.randn(a.hidden_size, a.hidden_size)).Q.T
    sizes = [1, n_token, n_context, n_context, *(n_key for _ in _KEY_POSITIONS)]
    constant, token_1, context_1, context_2, *keys = basis[: sum(sizes)].split(sizes)
    embedding = basis[sum(sizes) :]
    token, context, read = embedding[: n_token + n_context + a.v_head_dim].split(
        [n_token, n_context, a.v_head_dim]
    )
    return Directions(
        constant[0], token_1, context_1, context_2, tuple(keys), embedding, token, context, read
    )


def circuit_lr_factors(network: Network, factor: float) -> dict[str, float]:
    """Learning-rate factors that keep the circuit: `factor` for its weights, its root for their readers."""
    factors: dict[str, float] = {}
    for name, _ in network.named_parameters():
        if name.startswith(("embed_tokens.", "layers.0.self_attn.", "layers.1.self_attn.")):
            factors[name] = factor
        elif name.startswith(("layers.0.", "layers.1.input_layernorm", "lm_head.")):
            factors[name] = factor**0.5
    return factors


@torch.no_grad()
def write_copy_circuit(network: Network) -> None:
    """Overwrite parts of a new network: embeddings, the head, attention of layers 0 and 1."""
    d = _sample_directions(network.a)
    weight = network.embed_tokens.weight
    weight.copy_(torch.randn(network.a.vocab_size, len(d.embedding)) @ d.embedding * _EMBEDDING_STD)
    weight.mul_(math.sqrt(network.a.hidden_size / len(d.embedding))).add_(d.constant * _CONSTANT_NORM)
    first, second = (cast(TrainableLayer, layer).self_attn for layer in list(network.layers)[:2])
    _look_back(first, network.inverse_frequencies, d)
    _match_and_read(second, d)
    if network.lm_head is not None:
        tokens = weight - d.constant * _CONSTANT_NORM
        network.lm_head.weight.mul_(0.3).add_(tokens @ d.read.T @ d.read * _LOGIT_GAIN)


def _look_back(attention: TrainableAttention, frequencies: Tensor, d: Directions) -> None:
    """Write the heads that attend a fixed number of positions back and copy the tokens there."""
    a = attention.a
    n_token = len(d.token)
    key_part, _ = _constant_parts(attention)
    key = attention.kv_a_proj_with_mqa.weight
    key[: n_token + len(d.context)] = torch.cat((d.token, d.context))
    direction = torch.zeros(a.qk_rope_head_dim)
    direction[: 2 * _ROTATED_PAIRS : 2] = _BACK_STRENGTH
    key[a.kv_lora_rank :] *= 0.1
    key[a.kv_lora_rank :] += torch.outer(direction / key_part, d.constant)
    attention.q_a_proj.weight[0] = d.constant
    looks = [
        (1, 0, d.token_1 * _CARRIED_GAIN),
        (1, n_token, d.context_1 * _CARRIED_GAIN),
        (2, n_token, d.context_2 * _CARRIED_GAIN),
        *((back, 0, out * _KEY_GAIN) for back, out in zip(_KEY_POSITIONS, d.keys, strict=True)),
    ]
    # A network with fewer heads lacks the last ones.
    for head, (positions, latent, out) in enumerate(looks[: a.num_attention_heads]):
        _point_back(attention, frequencies, head, positions=positions, latent=latent, out=out)


def _constant_parts(attention: TrainableAttention) -> tuple[float, float]:
    """The approximate parts of the constant direction in keys and, after their norm, in queries."""
    a = attention.a
    norm = math.sqrt(_CONSTANT_NORM**2 + _EMBEDDING_STD**2 * a.hidden_size)
    key_part = _CONSTANT_NORM / norm * math.sqrt(a.hidden_size)
    assert a.q_lora_rank is not None
    return key_part, key_part / math.sqrt((key_part**2 + a.q_lora_rank) / a.q_lora_rank)


def _point_back(
    attention: TrainableAttention, frequencies: Tensor, head: int, *, positions: int, latent: int, out: Tensor
) -> None:
    """Make `head` attend `positions` back and write the latents from `latent` on along the rows of `out`."""
    a = attention.a
    _, query_part = _constant_parts(attention)
    query = attention.q_b_proj.weight.view(a.num_attention_heads, a.qk_head_dim, -1)
    kv = attention.kv_b_proj.weight.view(a.num_attention_heads, -1, a.kv_lora_rank)
    outputs = attention.o_proj.weight.view(a.hidden_size, a.num_attention_heads, a.v_head_dim)
    query[head] *= 0.1
    for pair in range(_ROTATED_PAIRS):
        # The query equals the key of that position, rotated forward by the distance.
        angle = -positions * float(frequencies[pair])
        at = a.qk_nope_head_dim + 2 * pair
        query[head, at, 0] = math.cos(angle) * _BACK_STRENGTH / query_part
        query[head, at + 1, 0] = math.sin(angle) * _BACK_STRENGTH / query_part
    rows = torch.arange(len(out))
    kv[head, : a.qk_nope_head_dim] *= 0.1
    kv[head, a.qk_nope_head_dim :] = 0
    kv[head, a.qk_nope_head_dim + rows, latent + rows] = 1
    outputs[:, head] = 0
    outputs[:, head, : len(out)] = out.T


def _match_and_read(attention: TrainableAttention, d: Directions) -> None:
    """Write the heads that attend after an occurrence of the last two tokens, and copy the token there."""
    a = attention.a
    n_token, n_matched = len(d.token), len(d.token) + len(d.context)
    key = attention.kv_a_proj_with_mqa.weight
    key[: n_matched + len(d.read)] = torch.cat((d.token_1, d.context_2, d.read))
    key[a.kv_lora_rank :] *= 0.1
    attention.q_a_proj.weight.mul_(0.2)
    attention.q_a_proj.weight[:n_matched] = torch.cat((d.token, d.context_1))
    query = attention.q_b_proj.weight.view(a.num_attention_heads, a.qk_head_dim, -1)
    kv = attention.kv_b_proj.weight.view(a.num_attention_heads, -1, a.kv_lora_rank)
    out = attention.o_proj.weight.view(a.hidden_size, a.num_attention_heads, a.v_head_dim)
    rows, values = torch.arange(a.qk_nope_head_dim), torch.arange(len(d.read))
    from_token = a.qk_nope_head_dim * 5 // 8
    for head in range(_MATCH_HEADS):
        # Each head compares a random choice of directions.
        chosen = torch.cat(
            (
                torch.randperm(n_token)[:from_token],
                n_token + torch.randperm(len(d.context))[: a.qk_nope_head_dim - from_token],
            )
        )
        query[head], kv[head] = 0, 0
        query[head, rows, chosen] = _MATCH_STRENGTH
        kv[head, rows, chosen] = _MATCH_STRENGTH
        kv[head, a.qk_nope_head_dim + values, n_matched + values] = 1
        out[:, head] = d.read.T * (_VALUE_GAIN / _MATCH_HEADS)

"""A first guess for the weights in which copying already works.

To copy "482135" a model must find the place where its last two tokens came before and read on from
there: heads that look back bring the tokens before, and later ones compare them with the current token
and the one before it (an induction circuit, arXiv 2209.11895). Small models take tens of millions of
tokens to find it from random weights; a run of an hour has a few million. So layer 0 starts with heads
that look one to four positions back, and layer 1 with four that match two tokens and read on. Everything
else is random, and everything is trained.

Directions of the residual stream at the start: one constant in every token, then those where layer 0
puts what it brings (`Directions`), then the subspace of the embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from models.networks.architecture import Architecture
from models.networks.network import Attention, Layer, Network

_EMBEDDING_STD = 0.5
_CONSTANT_NORM = 6.0
# Two heads look further back: what precedes a value, such as its key, says which value is meant.
_KEY_POSITIONS = (3, 4)
_KEY_GAIN = 0.4
_MATCH_HEADS = 4
# Logit of one position back against its neighbours: this squared times the softmax scale, about.
_BACK_STRENGTH = 6.5
# Frequencies that a look back uses: with only the fastest, positions a few periods away look alike, and heads
# that hit within 1,000 tokens miss within 3,000.
_ROTATED_PAIRS = 6
_CARRIED_GAIN = 0.6
_MATCH_STRENGTH = 2.0
_VALUE_GAIN = 2.0
_LOGIT_GAIN = 0.2


@dataclass(frozen=True, slots=True)
class Directions:
    """Orthonormal rows [n, H]. `token`, `context` and `read`: parts of an embedding.

    `token` of the token before goes to `token_1`; `context` of it to `context_1`, and of the one before that
    to `context_2`; `token` of those before them to `keys`. `read` is what matching copies.
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
    """Learning-rate factors that keep the circuit: `factor` where it lives, milder for what reads it."""
    factors: dict[str, float] = {}
    for name, _ in network.named_parameters():
        if name.startswith(("embed_tokens.", "layers.0.self_attn.", "layers.1.self_attn.")):
            factors[name] = factor
        elif name.startswith(("layers.0.", "layers.1.input_layernorm", "lm_head.")):
            factors[name] = factor**0.5
    return factors


@torch.no_grad()
def write_copy_circuit(network: Network) -> None:
    """Overwrites parts of a fresh network: embeddings, the head, attention of layers 0 and 1."""
    d = _sample_directions(network.a)
    weight = network.embed_tokens.weight
    weight.copy_(torch.randn(network.a.vocab_size, len(d.embedding)) @ d.embedding * _EMBEDDING_STD)
    weight.mul_(math.sqrt(network.a.hidden_size / len(d.embedding))).add_(d.constant * _CONSTANT_NORM)
    first, second = (cast(Layer, layer).self_attn for layer in list(network.layers)[:2])
    _look_back(first, network.inverse_frequencies, d)
    _match_and_read(second, d)
    if network.lm_head is not None:
        tokens = weight - d.constant * _CONSTANT_NORM
        network.lm_head.weight.mul_(0.3).add_(tokens @ d.read.T @ d.read * _LOGIT_GAIN)


def _look_back(attention: Attention, frequencies: Tensor, d: Directions) -> None:
    """Heads that attend a fixed number of positions back and carry what is there."""
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
    # A network with fewer heads does without the last ones.
    for head, (positions, latent, out) in enumerate(looks[: a.num_attention_heads]):
        _point_back(attention, frequencies, head, positions=positions, latent=latent, out=out)


def _constant_parts(attention: Attention) -> tuple[float, float]:
    """What the constant direction gives to keys and, after their norm, to queries; about."""
    a = attention.a
    norm = math.sqrt(_CONSTANT_NORM**2 + _EMBEDDING_STD**2 * a.hidden_size)
    key_part = _CONSTANT_NORM / norm * math.sqrt(a.hidden_size)
    assert a.q_lora_rank is not None
    return key_part, key_part / math.sqrt((key_part**2 + a.q_lora_rank) / a.q_lora_rank)


def _point_back(
    attention: Attention, frequencies: Tensor, head: int, *, positions: int, latent: int, out: Tensor
) -> None:
    """Makes `head` attend `positions` back and write the latents from `latent` on along the rows of `out`."""
    a = attention.a
    _, query_part = _constant_parts(attention)
    query = attention.q_b_proj.weight.view(a.num_attention_heads, a.qk_head_dim, -1)
    kv = attention.kv_b_proj.weight.view(a.num_attention_heads, -1, a.kv_lora_rank)
    outputs = attention.o_proj.weight.view(a.hidden_size, a.num_attention_heads, a.v_head_dim)
    query[head] *= 0.1
    for pair in range(_ROTATED_PAIRS):
        # The key so many positions back, rotated forward by them.
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


def _match_and_read(attention: Attention, d: Directions) -> None:
    """Heads that attend where the two tokens before equal the current two, and copy the token there."""
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
        # Each head compares its own choice of directions.
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

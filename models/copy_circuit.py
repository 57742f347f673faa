"""A first guess for the weights in which copying already works.

To copy "482135" a model must find the place where its last token came before and read on from there: one
head looks one token back, a later one compares the current token with what those heads brought (an
induction circuit, arXiv 2209.11895). Small models take tens of millions of tokens to find it from random
weights; a run of minutes has a few million. So layer 0 starts with two heads that look one position back,
and layer 1 with four that match and read on. Everything else is random, and everything is trained.

Directions of the residual stream at the start: one constant in every token (`constant`), the subspace of
the embeddings, and `carried`, where layer 0 puts the token before.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from models.network import Attention, Layer, Network

_EMBEDDING_STD = 0.5
_CONSTANT_NORM = 6.0
_BACK_HEADS = 2
# Two more heads look further back: what precedes a value, such as its key, says which value is meant.
_KEY_HEADS = ((4, 2), (5, 3))  # (head, positions back)
_KEY_GAIN = 0.4
_MATCH_HEADS = 4
# Logit of one position back against its neighbours: this squared times the softmax scale, about.
_BACK_STRENGTH = 6.5
_ROTATED_PAIRS = 3
_CARRIED_GAIN = 0.6
_MATCH_STRENGTH = 1.35
_VALUE_GAIN = 2.0
_LOGIT_GAIN = 0.2


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
    a = network.a
    n_carried = _BACK_HEADS * a.v_head_dim
    basis = torch.linalg.qr(torch.randn(a.hidden_size, a.hidden_size)).Q.T
    constant, carried, embedding = basis[0], basis[1 : 1 + n_carried], basis[1 + n_carried :]

    weight = network.embed_tokens.weight
    weight.copy_(torch.randn(a.vocab_size, len(embedding)) @ embedding * _EMBEDDING_STD)
    weight.mul_(math.sqrt(a.hidden_size / len(embedding))).add_(constant * _CONSTANT_NORM)

    first, second = (cast(Layer, layer).self_attn for layer in list(network.layers)[:2])
    matched = embedding[:n_carried]  # what of a token the first layer carries
    read_on = embedding[n_carried // 2 : n_carried // 2 + a.v_head_dim]  # what of a token is copied
    _look_back(first, network.inverse_frequencies, constant, matched, carried)
    n = a.v_head_dim
    _look_for_keys(first, network.inverse_frequencies, (embedding[2 * n : 3 * n], carried[n : 2 * n]))
    _match_and_read(second, matched[: a.v_head_dim], carried[: a.v_head_dim], read_on)
    if network.lm_head is not None:
        tokens = weight - constant * _CONSTANT_NORM
        network.lm_head.weight.mul_(0.3).add_(tokens @ read_on.T @ read_on * _LOGIT_GAIN)


def _look_back(
    attention: Attention, frequencies: Tensor, constant: Tensor, matched: Tensor, carried: Tensor
) -> None:
    """Heads that attend one position back and write that token's `matched` part to `carried`."""
    a = attention.a
    key_part, _ = _constant_parts(attention)
    key = attention.kv_a_proj_with_mqa.weight
    key[: a.kv_lora_rank] = matched[: a.kv_lora_rank]
    direction = torch.zeros(a.qk_rope_head_dim)
    direction[: 2 * _ROTATED_PAIRS : 2] = _BACK_STRENGTH
    key[a.kv_lora_rank :] *= 0.1
    key[a.kv_lora_rank :] += torch.outer(direction / key_part, constant)
    attention.q_a_proj.weight[0] = constant
    for head in range(_BACK_HEADS):
        part = slice(head * a.v_head_dim, (head + 1) * a.v_head_dim)
        _point_back(attention, frequencies, head, positions=1, latent=part, out=carried[part] * _CARRIED_GAIN)


def _look_for_keys(attention: Attention, frequencies: Tensor, directions: tuple[Tensor, Tensor]) -> None:
    """Heads that write the tokens two and three positions back, in directions that copying does not read."""
    latent = slice(0, attention.a.v_head_dim)
    for (head, positions), into in zip(_KEY_HEADS, directions, strict=True):
        if head >= attention.a.num_attention_heads or len(into) < attention.a.v_head_dim:
            continue  # a network too small to spare them
        _point_back(attention, frequencies, head, positions=positions, latent=latent, out=into * _KEY_GAIN)


def _constant_parts(attention: Attention) -> tuple[float, float]:
    """What the constant direction gives to keys and, after their norm, to queries; about."""
    a = attention.a
    norm = math.sqrt(_CONSTANT_NORM**2 + _EMBEDDING_STD**2 * a.hidden_size)
    key_part = _CONSTANT_NORM / norm * math.sqrt(a.hidden_size)
    assert a.q_lora_rank is not None
    return key_part, key_part / math.sqrt((key_part**2 + a.q_lora_rank) / a.q_lora_rank)


def _point_back(
    attention: Attention, frequencies: Tensor, head: int, *, positions: int, latent: slice, out: Tensor
) -> None:
    """Makes `head` attend `positions` back and write the `latent` part found there along `out`."""
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
    rows = torch.arange(a.v_head_dim)
    kv[head, : a.qk_nope_head_dim] *= 0.1
    kv[head, a.qk_nope_head_dim :] = 0
    kv[head, a.qk_nope_head_dim + rows, latent.start + rows] = 1
    outputs[:, head] = out.T


def _match_and_read(attention: Attention, matched: Tensor, carried: Tensor, read_on: Tensor) -> None:
    """Heads that attend where the token before equals the current one, and copy the token there."""
    a = attention.a
    n = len(matched)
    key = attention.kv_a_proj_with_mqa.weight
    key[:n], key[n : 2 * n] = carried, read_on
    key[a.kv_lora_rank :] *= 0.1
    attention.q_a_proj.weight.mul_(0.2)
    attention.q_a_proj.weight[:n] = matched
    query = attention.q_b_proj.weight.view(a.num_attention_heads, a.qk_head_dim, -1)
    kv = attention.kv_b_proj.weight.view(a.num_attention_heads, -1, a.kv_lora_rank)
    out = attention.o_proj.weight.view(a.hidden_size, a.num_attention_heads, a.v_head_dim)
    rows = torch.arange(a.qk_nope_head_dim)
    values = torch.arange(a.v_head_dim)
    for head in range(_MATCH_HEADS):
        # Each head compares its own choice of directions.
        chosen = torch.randperm(n)[: a.qk_nope_head_dim]
        query[head], kv[head] = 0, 0
        query[head, rows, chosen] = _MATCH_STRENGTH
        kv[head, rows, chosen] = _MATCH_STRENGTH
        kv[head, a.qk_nope_head_dim + values, n + values] = 1
        out[:, head] = read_on.T * (_VALUE_GAIN / _MATCH_HEADS)

"""Symmetric INT4 in groups of 32: rounding for training, packing for the checkpoint.

Format: compressed-tensors `pack-quantized`. u = q + 8 with q in [-8, 7]; along the input dimension
element i sits in int32 word i // 8 at bits 4 * (i % 8); w[r, c] = (u - 8) * scale[r, c // 32].
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.networks.architecture import GROUP_SIZE

_PER_WORD = 8
_Q_MAX = 7.5  # absmax / 7.5 uses -8 and 7 about equally, as the public K2.5 scales do


def group_scales(weight: Tensor) -> Tensor:
    """Scales [..., rows, cols / 32] in bf16 for `weight` [..., rows, cols]; an all-zero group gets 1."""
    groups = _grouped(weight.detach())
    scale = groups.abs().amax(-1) / _Q_MAX
    return torch.where(scale > 0, scale, torch.ones_like(scale)).bfloat16()


def quantize(weight: Tensor, scale: Tensor) -> Tensor:
    """Integers [..., rows, cols] in [-8, 7] (int8) nearest to `weight` under `scale`."""
    groups = _grouped(weight.detach())
    q = (groups / scale.float().unsqueeze(-1)).round_().clamp_(-8, 7)
    return q.flatten(-2).to(torch.int8)


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """bf16 weights [..., rows, cols]: the product is taken in fp32, then rounded, as the format says."""
    groups = _grouped(q.float())
    return (groups * scale.float().unsqueeze(-1)).flatten(-2).bfloat16()


def fake_quantize(weight: Tensor) -> Tensor:
    """`weight` with the values of the exported checkpoint, and the gradient of the identity."""
    with torch.no_grad():
        groups = _grouped(weight)
        scale = group_scales(weight).float().unsqueeze(-1)
        rounded = (groups / scale).round_().clamp_(-8, 7).mul_(scale).bfloat16().float().flatten(-2)
        delta = rounded - weight
    return weight + delta


def round_bfloat16(weight: Tensor) -> Tensor:
    """`weight` rounded to bf16, with the gradient of the identity."""
    with torch.no_grad():
        delta = weight.bfloat16().float() - weight
    return weight + delta


def _grouped(weight: Tensor) -> Tensor:
    """[..., cols] -> [..., cols / 32, 32]"""
    return weight.reshape(*weight.shape[:-1], -1, GROUP_SIZE)


def pack(q: Tensor) -> Tensor:
    """int8 [rows, cols] in [-8, 7] -> int32 words [rows, ceil(cols / 8)], low nibble first."""
    rows, cols = q.shape
    words = -(-cols // _PER_WORD)
    nibbles = torch.zeros(rows, words * _PER_WORD, dtype=torch.int64)
    nibbles[:, :cols] = q.to(torch.int64) + 8
    shifts = torch.arange(_PER_WORD, dtype=torch.int64) * 4
    word = (nibbles.view(rows, words, _PER_WORD) << shifts).sum(-1)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def unpack(packed: Tensor, cols: int) -> Tensor:
    """int32 words [rows, ceil(cols / 8)] -> int8 [rows, cols] in [-8, 7]."""
    shifts = torch.arange(_PER_WORD, dtype=torch.int32) * 4
    nibbles = (packed.unsqueeze(-1) >> shifts) & 0xF
    return (nibbles.flatten(-2)[..., :cols] - 8).to(torch.int8)

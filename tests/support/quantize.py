"""Quantized matrices from plain weights, as the publishers of checkpoints make them."""

from __future__ import annotations

import torch

from libs.engine.model_spec.matrix import Fp8Matrix, Int4Matrix
from libs.engine.model_spec.quantization import Fp8Blocks

_FP8_MAX = 448.0


def pack_int4(weight: torch.Tensor, group: int, scale_dtype: torch.dtype) -> Int4Matrix:
    """Quantizes [rows, cols] symmetrically (scale = absmax / 7.5 per group, as the compressor does)."""
    rows, cols = weight.shape
    grouped = weight.float().reshape(rows, cols // group, group)
    scale = (grouped.abs().amax(-1) / 7.5).clamp_min(1e-8).to(scale_dtype)
    values = (grouped / scale.float().unsqueeze(-1)).round().clamp(-8, 7).reshape(rows, cols)
    padded = torch.nn.functional.pad(values, (0, -cols % 8), value=-8.0).to(torch.int64) + 8
    words = (padded.reshape(rows, -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return Int4Matrix(signed, scale, cols, group)


def pack_fp8(weight: torch.Tensor, block: Fp8Blocks) -> Fp8Matrix:
    """Quantizes [rows, cols] to e4m3 (scale = absmax / 448 per block, as DeepSeek's `weight_quant`)."""
    scales, quantized = [], []
    for rows in torch.split(weight.float(), block.rows):
        blocks = torch.split(rows, block.cols, 1)
        factors = [float(part.abs().max().clamp_min(1e-8)) / _FP8_MAX for part in blocks]
        scales.append(factors)
        quantized.append(torch.cat([part / factor for part, factor in zip(blocks, factors, strict=True)], 1))
    return Fp8Matrix(
        torch.cat(quantized).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), torch.tensor(scales), block
    )

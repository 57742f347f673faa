"""A weight matrix in the form of the checkpoint: dense, INT4 pack-quantized, or FP8 in blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libs.engine.model_spec.quantization import Fp8Blocks


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """weight [rows, cols] fp32 or bf16, rows = output features."""

    weight: torch.Tensor

    @property
    def rows(self) -> int:
        return int(self.weight.shape[0])

    @property
    def cols(self) -> int:
        return int(self.weight.shape[1])

    def dequantised(self) -> torch.Tensor:
        """[rows, cols] fp32."""
        return self.weight.float()


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """compressed-tensors pack-quantized: symmetric INT4, one scale per row and group of input features.

    packed [rows, ceil(cols / 8)] i32: element i of a row is the nibble at bits 4 * (i % 8) of word i // 8,
    stored as value + 8; scale [rows, cols / group] in the checkpoint's dtype.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    cols: int
    group: int

    @property
    def rows(self) -> int:
        return int(self.packed.shape[0])

    def dequantised(self) -> torch.Tensor:
        """[rows, cols] fp32: the exact product of nibble and scale, not rounded to bf16."""
        return unpack_int4(self.packed, self.cols).float() * self.scale.float().repeat_interleave(
            self.group, 1
        )


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """DeepSeek-V3: e4m3 weights with one factor per block; the last blocks of rows and columns may be ragged.

    weight [rows, cols] float8_e4m3fn; scale_inv [ceil(rows / block.rows), ceil(cols / block.cols)]: what a
    stored value is multiplied by.
    """

    weight: torch.Tensor
    scale_inv: torch.Tensor
    block: Fp8Blocks


def unpack_int4(packed: torch.Tensor, cols: int) -> torch.Tensor:
    """[rows, words] i32 -> [rows, cols] i8 in -8..7."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 0xF
    return (nibbles.flatten(-2)[:, :cols] - 8).to(torch.int8)

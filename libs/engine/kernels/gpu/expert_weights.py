"""Weights of one or many experts in the form of the grouped product: bf16 or fp32, or repacked INT4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from libs.engine.model_spec.matrix import DenseMatrix, Int4Matrix, unpack_int4
from libs.engine.model_spec.stored_matrix import Matrix, StoredMatrix

_WORD_VALUES = 8


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """[E, rows, cols] on the device.

    Dense: `data` [E, rows, cols], and `group` is 0.
    INT4: `data` [E, rows, padded cols / 8] i32, and `scale` [E, padded cols / group, rows]. Nibble i of word
    j of a block of 8 * group columns is column i * group + j. So one shift of a tile of words gives values
    of one group: they share a scale, and the activations beside them are contiguous.
    """

    data: torch.Tensor
    scale: torch.Tensor
    rows: int
    cols: int
    group: int


def repack_int4(matrix: Int4Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """The words and scales of `ExpertWeights` for one matrix. Padded columns have scale 0."""
    block = _WORD_VALUES * matrix.group
    n_padded = -(-matrix.cols // block) * block
    nibbles = torch.full((matrix.rows, n_padded), 8, dtype=torch.int32)
    nibbles[:, : matrix.cols] = unpack_int4(matrix.packed, matrix.cols).int() + 8
    blocks = nibbles.view(matrix.rows, -1, _WORD_VALUES, matrix.group)
    words = torch.zeros(blocks.shape[0], blocks.shape[1], matrix.group, dtype=torch.int32)
    for index in range(_WORD_VALUES):
        words |= blocks[:, :, index] << (4 * index)
    scale = matrix.scale.new_zeros(n_padded // matrix.group, matrix.rows)
    scale[: matrix.scale.shape[1]] = matrix.scale.T
    return words.flatten(1), scale


def in_memory(matrix: Matrix) -> DenseMatrix | Int4Matrix:
    """The matrix without its file."""
    return matrix.read() if isinstance(matrix, StoredMatrix) else matrix


def is_repackable(matrix: Matrix) -> bool:
    """Whether a tile of words is a power of two of at least 16 values wide, which a matrix unit needs."""
    return isinstance(matrix, Int4Matrix) and matrix.group >= 16 and matrix.group & (matrix.group - 1) == 0


def stack_experts(
    stored: Sequence[Sequence[Matrix]], device: torch.device, dense_dtype: torch.dtype
) -> ExpertWeights:
    """Each expert's matrices, of equal columns, below one another. INT4 stays INT4 when all of it can."""
    experts = [[in_memory(matrix) for matrix in expert] for expert in stored]
    rows, cols = sum(matrix.rows for matrix in experts[0]), experts[0][0].cols
    groups = {m.group if isinstance(m, Int4Matrix) and is_repackable(m) else 0 for e in experts for m in e}
    if len(groups) == 1 and (group := groups.pop()):
        packed = [[repack_int4(m) for m in expert if isinstance(m, Int4Matrix)] for expert in experts]
        data = torch.stack([torch.cat([words for words, _ in parts]).to(device) for parts in packed])
        scale = torch.stack([torch.cat([s for _, s in parts], dim=1).to(device) for parts in packed])
        return ExpertWeights(data, scale, rows, cols, group)
    dense = torch.stack(
        [torch.cat([matrix.dequantised().to(dense_dtype) for matrix in e]).to(device) for e in experts]
    )
    return ExpertWeights(dense, dense.new_zeros(1), rows, cols, 0)

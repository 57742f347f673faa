"""Weights of one or many experts in the form of the grouped product: bf16 or fp32, or repacked INT4."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from libs.engine.model_spec.matrix import DenseMatrix, Int4Matrix
from libs.engine.model_spec.stored_matrix import Matrix, StoredMatrix

_WORD_VALUES = 8
# Of the rows that are in the host at once: a few copies of them, the widest of 4 bytes a value.
_PIECE_VALUES = 2 << 20


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
    n_padded = _padded(matrix.cols, matrix.group)
    stored = matrix.packed.contiguous().view(torch.uint8)  # a byte has two nibbles, the lower one first
    nibbles = torch.full((matrix.rows, n_padded), 8, dtype=torch.uint8)
    nibbles[:, : matrix.cols] = torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(1)[:, : matrix.cols]
    pairs = nibbles.view(matrix.rows, -1, _WORD_VALUES // 2, 2, matrix.group)
    words = (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).transpose(2, 3).contiguous().view(torch.int32)
    scale = matrix.scale.new_zeros(n_padded // matrix.group, matrix.rows)
    scale[: matrix.scale.shape[1]] = matrix.scale.T
    return words.view(matrix.rows, -1), scale


def int4_group(matrix: Matrix) -> int:
    """The group of INT4 whose tiles of words a matrix unit takes: 16, 32, ... values wide; else 0."""
    group = 0 if isinstance(matrix, DenseMatrix) else matrix.group
    return group if group >= 16 and not group & (group - 1) else 0


def stack_experts(
    experts: Sequence[Sequence[Matrix]], device: torch.device, dense_dtype: torch.dtype
) -> ExpertWeights:
    """Each expert's matrices, of equal columns, below one another. INT4 stays INT4 when all of it can.

    Rows of a checkpoint go to their final place in pieces. So the host has no expert, and the device none
    twice.
    """
    rows, cols = sum(matrix.rows for matrix in experts[0]), experts[0][0].cols
    groups = {int4_group(matrix) for expert in experts for matrix in expert}
    if len(groups) == 1 and (group := groups.pop()):
        n_padded = _padded(cols, group)
        shape = (len(experts), rows, n_padded // _WORD_VALUES)
        data = torch.empty(shape, dtype=torch.int32, device=device)
        dtypes = [_scale_dtype(matrix) for expert in experts for matrix in expert]
        scale = torch.empty(
            (len(experts), n_padded // group, rows),
            dtype=functools.reduce(torch.promote_types, dtypes),
            device=device,
        )
        for index, expert in enumerate(experts):
            for span, piece in _pieces(expert):
                assert isinstance(piece, Int4Matrix)
                words, factors = repack_int4(piece)
                data[index, span].copy_(words)
                scale[index, :, span].copy_(factors)
        return ExpertWeights(data, scale, rows, cols, group)
    dense = torch.empty((len(experts), rows, cols), dtype=dense_dtype, device=device)
    for index, expert in enumerate(experts):
        _fill(dense[index], expert)
    return ExpertWeights(dense, dense.new_zeros(1), rows, cols, 0)


def stack_dense(matrices: Sequence[Matrix], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Matrices of equal columns below one another, dequantised: [rows, cols]."""
    rows = sum(matrix.rows for matrix in matrices)
    found = torch.empty((rows, matrices[0].cols), dtype=dtype, device=device)
    _fill(found, matrices)
    return found


def _fill(target: torch.Tensor, matrices: Sequence[Matrix]) -> None:
    for span, piece in _pieces(matrices):
        values = piece.weight if isinstance(piece, DenseMatrix) else piece.dequantised()
        target[span].copy_(values.to(target.dtype))


def _pieces(matrices: Sequence[Matrix]) -> Iterator[tuple[slice, DenseMatrix | Int4Matrix]]:
    """Some rows of the stacked matrices at a time, and where they are in the stack."""
    begin = 0
    for matrix in matrices:
        step = max(1, _PIECE_VALUES // matrix.cols)
        for first in range(0, matrix.rows, step):
            rows = slice(first, min(first + step, matrix.rows))
            yield slice(begin + rows.start, begin + rows.stop), _read_rows(matrix, rows)
        begin += matrix.rows


def _read_rows(matrix: Matrix, rows: slice) -> DenseMatrix | Int4Matrix:
    if isinstance(matrix, StoredMatrix):
        return matrix.cut_rows(rows).read()
    if isinstance(matrix, DenseMatrix):
        return DenseMatrix(matrix.weight[rows])
    return Int4Matrix(matrix.packed[rows], matrix.scale[rows], matrix.cols, matrix.group)


def _padded(cols: int, group: int) -> int:
    block = _WORD_VALUES * group
    return -(-cols // block) * block


def _scale_dtype(matrix: Matrix) -> torch.dtype:
    assert not isinstance(matrix, DenseMatrix) and matrix.scale is not None
    return matrix.scale.dtype

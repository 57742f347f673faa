"""A weight matrix in the files of a checkpoint, whose rows are read in pieces while they are packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from libs.engine.model_spec.matrix import DenseMatrix, Int4Matrix
from libs.engine.model_spec.quantization import Fp8Blocks

# Receives the index of the first row and rows that are valid during the call. False: a value is out of range.
RowSink = Callable[[int, torch.Tensor], bool]

_WORD_VALUES = 8


@dataclass(frozen=True, slots=True)
class Fp8Place:
    """Where rows of FP8 lie in their tensor, and the fp32 `factors` [blocks of rows, of columns] of it."""

    first_row: int
    first_col: int
    factors: torch.Tensor
    block: Fp8Blocks

    def arguments(self) -> tuple[int, ...]:
        """What the compiled functions take after the values and their shape."""
        factors = self.factors.data_ptr(), self.factors.shape[1]
        return self.first_row, self.first_col, *factors, self.block.rows, self.block.cols


@runtime_checkable
class Fp8Sink(Protocol):
    """A `RowSink` that takes rows in FP8, too, so that nothing has to widen them before."""

    def __call__(self, first: int, rows: torch.Tensor) -> bool: ...

    def take_fp8(self, first: int, rows: torch.Tensor, place: Fp8Place) -> bool: ...


class StoredRows(Protocol):
    """A stored tensor [n_rows, n_cols], or a cut of one."""

    @property
    def n_rows(self) -> int: ...

    @property
    def n_cols(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def cut(self, rows: slice | None, cols: slice | None) -> StoredRows: ...

    def read(self) -> torch.Tensor:
        """All rows, checked. Raises CheckpointError."""
        ...

    def stream(self, sink: RowSink, unit: int) -> None:
        """Have threads pass all rows to `sink` until the checkpoint is finished.

        Each piece begins at a multiple of `unit` rows. Rows that `sink` refuses fail the load.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Dense values, or words of INT4 as in `Int4Matrix` with their scales."""

    values: StoredRows
    cols: int
    scale: StoredRows | None = None
    group: int = 0

    @property
    def rows(self) -> int:
        return self.values.n_rows

    def read(self) -> DenseMatrix | Int4Matrix:
        if self.scale is None:
            return DenseMatrix(self.values.read())
        return Int4Matrix(self.values.read(), self.scale.read(), self.cols, self.group)

    def dequantised(self) -> torch.Tensor:
        """[rows, cols] fp32."""
        return self.read().dequantised()

    def cut_rows(self, span: slice) -> StoredMatrix:
        scale = self.scale and self.scale.cut(span, None)
        return replace(self, values=self.values.cut(span, None), scale=scale)

    def cut_cols(self, span: slice) -> StoredMatrix:
        """INT4 is cut between its groups."""
        n_cols = span.stop - span.start
        if self.scale is None:
            return replace(self, values=self.values.cut(None, span), cols=n_cols)
        words = slice(span.start // _WORD_VALUES, -(-span.stop // _WORD_VALUES))
        groups = slice(span.start // self.group, span.stop // self.group)
        return replace(
            self, values=self.values.cut(None, words), scale=self.scale.cut(None, groups), cols=n_cols
        )


# What the kernels take; FP8 is dequantised when it is loaded.
Matrix = DenseMatrix | Int4Matrix | StoredMatrix

"""Stored tensors of equal width and dtype, one below the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libs.engine.model_spec.stored_matrix import RowSink, StoredRows


@dataclass(frozen=True, slots=True)
class StackedRows:
    """`upper` over `lower`, for packing as one matrix."""

    upper: StoredRows
    lower: StoredRows

    @property
    def n_rows(self) -> int:
        return self.upper.n_rows + self.lower.n_rows

    @property
    def n_cols(self) -> int:
        return self.upper.n_cols

    @property
    def dtype(self) -> torch.dtype:
        return self.upper.dtype

    def cut(self, rows: slice | None, cols: slice | None) -> StoredRows:
        start, stop, _ = (rows or slice(None)).indices(self.n_rows)
        border = self.upper.n_rows
        if start >= border:
            return self.lower.cut(slice(start - border, stop - border), cols)
        upper = self.upper.cut(slice(start, min(stop, border)), cols)
        return upper if stop <= border else StackedRows(upper, self.lower.cut(slice(stop - border), cols))

    def read(self) -> torch.Tensor:
        return torch.cat((self.upper.read(), self.lower.read()))

    def stream(self, sink: RowSink, unit: int) -> None:
        """Where the lower part begins within a unit, all rows are read and taken at once."""
        offset = self.upper.n_rows
        if offset % unit:
            sink(0, self.read())
            return
        self.upper.stream(sink, unit)
        self.lower.stream(lambda first, rows: sink(offset + first, rows), unit)

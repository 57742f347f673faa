"""StackedRows: every cut reads what a cut of the joined tensor has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch

from libs.engine.model_spec.stacked_rows import StackedRows
from libs.engine.model_spec.stored_matrix import RowSink


@dataclass
class Rows:
    """A tensor in memory."""

    values: torch.Tensor

    @property
    def n_rows(self) -> int:
        return self.values.shape[0]

    @property
    def n_cols(self) -> int:
        return self.values.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def cut(self, rows: slice | None, cols: slice | None) -> Rows:
        return Rows(self.values[rows or slice(None), cols or slice(None)])

    def read(self) -> torch.Tensor:
        return self.values

    def stream(self, sink: RowSink, unit: int) -> None:
        sink(0, self.values)


def test_cuts_of_rows_and_columns_are_those_of_the_joined_tensor() -> None:
    joined = torch.arange(35.0).view(7, 5)
    stacked = StackedRows(Rows(joined[:3]), Rows(joined[3:]))
    for cols in (None, slice(1, 4)):
        assert torch.equal(stacked.cut(None, cols).read(), joined[:, cols or slice(None)])
        for start, stop in combinations(range(8), 2):
            found = stacked.cut(slice(start, stop), cols).read()
            assert torch.equal(found, joined[start:stop, cols or slice(None)])

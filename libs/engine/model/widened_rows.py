"""Stored rows in another dtype than the file's. The threads that read a checkpoint convert them."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from libs.engine.kernels.library import load_library
from libs.engine.kernels.native_types import declare
from libs.engine.model.tensor_rows import TensorRows, copy_into
from libs.engine.model_spec.quantization import Fp8Blocks
from libs.engine.model_spec.stored_matrix import Fp8Place, Fp8Sink, RowSink, StoredRows

_SERIAL_VALUES = 1 << 14  # torch computes on several threads from 32,768 values on

# The dtype in which the engine holds values of a file's dtype.
DtypeOf = Callable[[torch.dtype], torch.dtype]


def held_dtype(stored: torch.dtype) -> torch.dtype:
    """fp16 and FP8 are widened to fp32, and others stay."""
    return torch.float32 if stored in (torch.float16, torch.float8_e4m3fn) else stored


@dataclass(frozen=True, slots=True)
class _ConvertedRows:
    """Stored rows, which `_converting` turns into `dtype`."""

    stored: TensorRows
    dtype: torch.dtype

    @property
    def n_rows(self) -> int:
        return self.stored.n_rows

    @property
    def n_cols(self) -> int:
        return self.stored.n_cols

    def cut(self, rows: slice | None, cols: slice | None) -> Self:
        return replace(self, stored=self.stored.cut(rows, cols))

    def stream(self, sink: RowSink, unit: int) -> None:
        self.stored.stream(self._converting(sink), unit)

    @abstractmethod
    def _converting(self, sink: RowSink) -> RowSink:
        """Takes stored rows, and passes them on to `sink` in `dtype`."""


@dataclass(frozen=True, slots=True)
class CastRows(_ConvertedRows):
    """Dense values of one dtype as another."""

    def read(self) -> torch.Tensor:
        return _finite(_cast(self.stored.read(), self.dtype), self.stored)

    def _converting(self, sink: RowSink) -> RowSink:
        return lambda first, rows: sink(first, _cast(rows, self.dtype))


class BlockFactors:
    """The scales of a tensor, which the first thread that needs them reads."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._found: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        with self._lock:
            if self._found is None:
                self._found = self._read()
            return self._found


@dataclass(frozen=True, slots=True)
class Fp8Rows(_ConvertedRows):
    """e4m3 values times the factors of their blocks: products in fp32, rounded to `dtype` (fp32 or bf16).

    As DeepSeek's `weight_dequant` does. `factors` are those of the whole tensor [blocks of rows, of columns].
    """

    factors: BlockFactors
    block: Fp8Blocks

    def read(self) -> torch.Tensor:
        found = torch.empty(self.n_rows, self.n_cols, dtype=self.dtype)
        self.stored.each(self._converting(copy_into(found)))
        return _finite(found, self.stored)

    def _converting(self, sink: RowSink) -> RowSink:
        if isinstance(sink, Fp8Sink):
            take = sink.take_fp8
            return lambda first, rows: take(first, rows, self._place(first))
        widen, is_bf16 = declare(load_library()).ss_widen_fp8, self.dtype == torch.bfloat16

        def widen_and_pass(first: int, rows: torch.Tensor) -> bool:
            found = torch.empty(rows.shape, dtype=self.dtype)
            targets = (None, found.data_ptr()) if is_bf16 else (found.data_ptr(), None)
            is_finite = widen(rows.data_ptr(), *rows.shape, *self._place(first).arguments(), *targets)
            return bool(is_finite) and sink(first, found)

        return widen_and_pass

    def _place(self, first: int) -> Fp8Place:
        rows, cols = self.stored.rows, self.stored.cols
        return Fp8Place(rows.start + first, cols.start, self.factors.get(), self.block)


def _finite(values: torch.Tensor, stored: TensorRows) -> torch.Tensor:
    """The values, which may have become infinite when they were rounded. Raises CheckpointError."""
    if not bool(torch.isfinite(values).all()):
        raise stored.refusal()
    return values


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts in parts so small that torch starts no threads: several readers convert at once."""
    found = torch.empty(values.shape, dtype=dtype)
    for target, part in zip(
        torch.split(found.view(-1), _SERIAL_VALUES),
        torch.split(values.reshape(-1), _SERIAL_VALUES),
        strict=True,
    ):
        target.copy_(part)
    return found


def as_dtype(stored: TensorRows, dtype_of: DtypeOf) -> StoredRows:
    """The rows in the dtype for theirs."""
    dtype = dtype_of(stored.dtype)
    return stored if stored.dtype == dtype else CastRows(stored, dtype)

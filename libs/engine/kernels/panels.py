"""Weights in panels of 16 rows, the form that the compiled kernels read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from libs.engine.kernels.native_types import MATRIX
from libs.engine.model_spec.matrix import DenseMatrix
from libs.engine.model_spec.stored_matrix import Fp8Place, Matrix, StoredMatrix, StoredRows

_LANES = 16
_F32, _BF16, _INT4 = 0, 1, 2
_KIND_OF_DTYPE = {torch.float32: _F32, torch.bfloat16: _BF16, torch.int32: _INT4}
_WORD = {torch.float32: torch.float32, torch.bfloat16: torch.int16}  # what numpy has of the same size
_INT4_DOUBLINGS = 3  # scales multiply numbers of up to 8


class TensorMemory(Protocol):
    """Where packed weights are put."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros."""
        ...


@dataclass(frozen=True, slots=True)
class Panels:
    """One matrix of rows x cols, or one a head: data [heads, padded rows, words or padded cols].

    `scale` and `group` are those of INT4; `data` then has words of eight values.
    """

    rows: int
    cols: int
    data: torch.Tensor
    scale: torch.Tensor | None = None
    group: int = 0

    def structs(self) -> Iterator[MATRIX]:
        """The C view of each matrix. This object must outlive it."""
        kind, scale = _KIND_OF_DTYPE[self.data.dtype], self.scale
        scale_kind = 0 if scale is None else _KIND_OF_DTYPE[scale.dtype]
        scales = None if scale is None else scale.data_ptr()
        for data in self.data if self.data.dim() == 3 else (self.data,):
            yield MATRIX(data.data_ptr(), scales, self.rows, self.cols, kind, scale_kind, self.group, 0)


class PanelPacker:
    """Packs matrices into a memory. Those of a checkpoint are filled by its threads, until it is finished."""

    def __init__(self, library: ctypes.CDLL, memory: TensorMemory) -> None:
        self._memory = memory
        self._library = library

    def pack(self, matrix: Matrix | Panels) -> Panels:
        """The panels of one matrix; those that are packed already stay as they are."""
        if isinstance(matrix, Panels):
            return matrix
        if isinstance(matrix, StoredMatrix):
            return self._stored(matrix)
        if isinstance(matrix, DenseMatrix):
            return Panels(matrix.rows, matrix.cols, self._dense(matrix.weight))
        if matrix.group % 8:  # a word of eight values would cross groups
            return self.pack(DenseMatrix(matrix.dequantised()))
        words = matrix.packed.contiguous()
        data = self._empty(matrix.rows, words.shape[1], torch.int32)
        self._library.ss_pack_int4(words.data_ptr(), matrix.rows, words.shape[1], data.data_ptr())
        return Panels(matrix.rows, matrix.cols, data, self._dense(matrix.scale), matrix.group)

    def pack_heads(self, matrix: DenseMatrix | StoredMatrix, nope: int, v: int) -> tuple[Panels, Panels]:
        """The two matrices of each head of kv_b_proj: keys [kv_lora, nope], values [v, kv_lora]."""
        rows = matrix.values if isinstance(matrix, StoredMatrix) else _HeldRows(_widened(matrix.weight))
        n_heads, lora, dtype = rows.n_rows // (nope + v), rows.n_cols, rows.dtype
        keys, values = self._empty(lora, nope, dtype, n_heads), self._empty(v, lora, dtype, n_heads)

        def pack(first: int, piece: torch.Tensor) -> bool:
            head, fits = first // (nope + v), True
            for stored in piece.view(-1, nope + v, lora).view(_WORD[dtype]).numpy():
                turned = np.ascontiguousarray(stored[:nope].T)
                fits &= _pack_dense(self._library, dtype, turned.ctypes.data, (lora, nope), keys[head])
                fits &= _pack_dense(self._library, dtype, stored[nope:].ctypes.data, (v, lora), values[head])
                head += 1
            return fits

        if isinstance(rows, _HeldRows):
            pack(0, rows.values)
        else:
            rows.stream(pack, nope + v)
        return Panels(lora, nope, keys), Panels(v, lora, values)

    def _stored(self, matrix: StoredMatrix) -> Panels:
        if matrix.scale is None:
            return Panels(matrix.rows, matrix.cols, self._streamed(matrix.values))
        scale = self._streamed(matrix.scale, _INT4_DOUBLINGS)
        return Panels(matrix.rows, matrix.cols, self._streamed(matrix.values), scale, matrix.group)

    def _streamed(self, rows: StoredRows, doublings: int = 0) -> torch.Tensor:
        data = self._empty(rows.n_rows, rows.n_cols, rows.dtype)
        rows.stream(_PanelSink(self._library, data, doublings), _LANES)
        return data

    def _dense(self, weight: torch.Tensor) -> torch.Tensor:
        source = _widened(weight)
        rows, cols = source.shape
        data = self._empty(rows, cols, source.dtype)
        _pack_dense(self._library, source.dtype, source.data_ptr(), (rows, cols), data)
        return data

    def _empty(self, rows: int, cols: int, dtype: torch.dtype, n_heads: int | None = None) -> torch.Tensor:
        padded = (-(-rows // _LANES) * _LANES, cols + cols % 2 if dtype == torch.bfloat16 else cols)
        return self._memory.allocate(padded if n_heads is None else (n_heads, *padded), dtype)


@dataclass(frozen=True, slots=True)
class _PanelSink:
    """Packs rows of a checkpoint into panels. Each value is doubled `doublings` times when it is used."""

    library: ctypes.CDLL
    data: torch.Tensor
    doublings: int

    def __call__(self, first: int, rows: torch.Tensor) -> bool:
        source, shape, target = rows.data_ptr(), tuple(rows.shape), self.data[first]
        if rows.dtype != torch.int32:
            return _pack_dense(self.library, rows.dtype, source, shape, target, self.doublings)
        self.library.ss_pack_int4(source, *shape, target.data_ptr())
        return True

    def take_fp8(self, first: int, rows: torch.Tensor, place: Fp8Place) -> bool:
        target, is_bf16 = self.data[first].data_ptr(), self.data.dtype == torch.bfloat16
        pack = self.library.ss_pack_fp8
        return bool(pack(rows.data_ptr(), *rows.shape, *place.arguments(), target, is_bf16))


def _pack_dense(
    library: ctypes.CDLL,
    dtype: torch.dtype,
    source: int,
    shape: tuple[int, ...],
    target: torch.Tensor,
    doublings: int = 0,
) -> bool:
    """Whether all values are finite, also when doubled so often."""
    pack = library.ss_pack_bf16 if dtype == torch.bfloat16 else library.ss_pack_f32
    return bool(pack(source, *shape, target.data_ptr(), doublings))


@dataclass(frozen=True, slots=True)
class _HeldRows:
    values: torch.Tensor

    @property
    def n_rows(self) -> int:
        return len(self.values)

    @property
    def n_cols(self) -> int:
        return int(self.values.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype


def _widened(weight: torch.Tensor) -> torch.Tensor:
    """bf16 or fp32, contiguous."""
    return weight.contiguous() if weight.dtype == torch.bfloat16 else weight.float().contiguous()

"""The rows of one tensor of a checkpoint, read in pieces by the threads of a `ShardReader`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from libs.engine.model.shard_file import Bytes
from libs.engine.model.shard_reader import ShardReader
from libs.engine.model.shards import CheckpointError, TensorHeader
from libs.engine.model_spec.stored_matrix import RowSink

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I32": torch.int32,
    "I64": torch.int64,
}

_PIECE_BYTES = 2 << 20  # of one read: larger ones leave the processor's caches before they are packed
_JOB_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class RowSource:
    """The part that all cuts of one tensor share. `check` raises CheckpointError for values out of range."""

    name: str
    header: TensorHeader
    reader: ShardReader
    count: Callable[[int], None]  # bytes that are read
    check: Callable[[torch.Tensor], torch.Tensor]

    @property
    def row_bytes(self) -> int:
        return self.header.shape[1] * DTYPES[self.header.dtype].itemsize

    def read(self, first: int, end: int, *, others_read: bool) -> Bytes:
        """Whole rows as [rows, bytes], valid until this thread reads again."""
        header, n_bytes = self.header, (end - first) * self.row_bytes
        begin = header.offset + first * self.row_bytes
        try:
            found = self.reader.read(header.shard, begin, n_bytes, others_read=others_read)
        except OSError as error:
            raise CheckpointError(self.name, f"cannot be read from {header.shard}: {error}") from error
        self.count(n_bytes)
        return found.reshape(end - first, self.row_bytes)


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Rows and columns of a tensor. Only the rows are read; columns are cut from whole rows."""

    source: RowSource
    rows: range
    cols: range

    @classmethod
    def of(cls, source: RowSource) -> TensorRows:
        rows, cols = source.header.shape
        return cls(source, range(rows), range(cols))

    @property
    def n_rows(self) -> int:
        return len(self.rows)

    @property
    def n_cols(self) -> int:
        return len(self.cols)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.source.header.dtype]

    def cut(self, rows: slice | None, cols: slice | None) -> TensorRows:
        return replace(
            self,
            rows=self.rows if rows is None else self.rows[rows],
            cols=self.cols if cols is None else self.cols[cols],
        )

    def read(self) -> torch.Tensor:
        found = torch.empty(self.n_rows, self.n_cols, dtype=self.dtype)
        self.each(copy_into(found))
        try:
            return self.source.check(found)
        except CheckpointError:
            if self == TensorRows.of(self.source):
                raise
            raise self.refusal() from None  # names the place in the tensor, not in the cut

    def each(self, sink: RowSink) -> None:
        """Pass all rows to `sink` on this thread. Raises CheckpointError for rows that it refuses."""
        self._pass(sink, 0, self.n_rows, 1)

    def stream(self, sink: RowSink, unit: int) -> None:
        step = self._step(_JOB_BYTES, unit)
        for first in range(0, self.n_rows, step):
            end = min(first + step, self.n_rows)
            self.source.reader.submit(partial(self._pass, sink, first, end, unit))

    def _pass(self, sink: RowSink, first: int, end: int, unit: int) -> None:
        step = self._step(_PIECE_BYTES, unit)
        for row in range(first, end, step):
            if not sink(row, self._piece(row, min(row + step, end))):
                raise self.refusal()

    def _piece(self, first: int, end: int) -> torch.Tensor:
        size = self.dtype.itemsize
        is_cut = self.n_cols * size < self.source.row_bytes  # other ranks take the other columns
        stored = self.source.read(self.rows.start + first, self.rows.start + end, others_read=is_cut)
        if is_cut:
            stored = np.ascontiguousarray(stored[:, self.cols.start * size : self.cols.stop * size])
        values = torch.frombuffer(stored.data, dtype=self.dtype)
        return values.view(end - first, self.n_cols)

    def _step(self, n_bytes: int, unit: int) -> int:
        return max(n_bytes // max(self.source.row_bytes, 1) // unit, 1) * unit

    def refusal(self) -> CheckpointError:
        """Why rows were refused. Reads the whole tensor again to count the defects."""
        try:
            self.source.check(TensorRows.of(self.source).read())
        except CheckpointError as error:
            return error
        reason = "changed while it was read, or has values that the dtype in memory does not hold"
        return CheckpointError(self.source.name, reason)


def copy_into(target: torch.Tensor) -> RowSink:
    """Copies rows of any dtype; does not check them."""
    if target.device.type != "cpu":

        def upload(first: int, rows: torch.Tensor) -> bool:
            target[first : first + len(rows)].copy_(rows)  # returns when the rows are read
            return True

        return upload
    words = target.view(torch.uint8).numpy()  # torch would copy with threads besides those that read

    def sink(first: int, rows: torch.Tensor) -> bool:
        np.copyto(words[first : first + len(rows)], rows.view(torch.uint8).numpy())
        return True

    return sink


def copy_finite_into(target: torch.Tensor) -> RowSink:
    """Copy like `copy_into`; refuse rows with a NaN or an infinity."""
    copy, word = copy_into(target), np.uint16 if target.dtype == torch.bfloat16 else np.uint32
    exponent = word(0x7F80 if target.dtype == torch.bfloat16 else 0x7F800000)

    def sink(first: int, rows: torch.Tensor) -> bool:
        bits = rows.view(torch.uint8).numpy().view(word)
        return copy(first, rows) and bool(np.bitwise_and(bits, exponent).max(initial=word(0)) < exponent)

    return sink

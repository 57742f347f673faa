"""The rows of one tensor of a checkpoint, read in pieces by the threads of a `ShardReader`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

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

T = TypeVar("T")

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

    def mapped(self, first: int, end: int) -> Bytes | None:
        """Whole rows in the page cache, as `read` gives them; None where they are not in it."""
        begin, n_bytes = self._span(first, end)
        found = self._raised(partial(self.reader.map_cached, self.header.shard, begin, n_bytes))
        return None if found is None else found.reshape(end - first, self.row_bytes)

    def read(self, first: int, end: int, *, others_read: bool) -> Bytes:
        """Whole rows as [rows, bytes], valid until this thread maps or reads others."""
        read = partial(self.reader.read, self.header.shard, *self._span(first, end), others_read=others_read)
        return self._raised(read).reshape(end - first, self.row_bytes)

    def _span(self, first: int, end: int) -> tuple[int, int]:
        return self.header.offset + first * self.row_bytes, (end - first) * self.row_bytes

    def _raised(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except OSError as error:
            reason = f"cannot be read from {self.header.shard}: {error}"
            raise CheckpointError(self.name, reason) from error


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
        for job in self._jobs(sink, 1):
            job()

    def stream(self, sink: RowSink, unit: int) -> None:
        for job in self._jobs(sink, unit):
            self.source.reader.submit(job)

    def _jobs(self, sink: RowSink, unit: int) -> Iterator[Callable[[], None]]:
        step = self._step(_JOB_BYTES, unit)
        for first in range(0, self.n_rows, step):
            yield partial(self._pass, sink, first, min(first + step, self.n_rows), unit)

    def _pass(self, sink: RowSink, first: int, end: int, unit: int) -> None:
        step, start = self._step(_PIECE_BYTES, unit), self.rows.start
        is_cut = self.n_cols * self.dtype.itemsize < self.source.row_bytes  # other ranks take the others
        mapped = self.source.mapped(start + first, start + end)
        for row in range(first, end, step):
            stop = min(row + step, end)
            if mapped is not None:
                stored = mapped[row - first : stop - first]
            else:
                stored = self.source.read(start + row, start + stop, others_read=is_cut)
            self.source.count(stored.size)
            if not sink(row, self._values(stored)):
                raise self.refusal()

    def _values(self, stored: Bytes) -> torch.Tensor:
        """Rows [rows, n_cols] of whole stored ones."""
        begin, end = (col * self.dtype.itemsize for col in (self.cols.start, self.cols.stop))
        wanted = np.ascontiguousarray(stored[:, begin:end])
        return torch.frombuffer(wanted.data, dtype=self.dtype).view(len(stored), self.n_cols)

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

"""Reads a sharded safetensors checkpoint by tensor name; checks shapes, dtypes and that values are finite."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from libs.engine.model.shard_file import read_no_further
from libs.engine.model.shard_reader import ShardReader
from libs.engine.model.shards import (
    MAX_HEADER_BYTES,
    CheckpointError,
    TensorHeader,
    read_headers,
    shard_names,
)
from libs.engine.model.tensor_rows import DTYPES, RowSource, TensorRows
from libs.engine.model.widened_rows import BlockFactors, DtypeOf, Fp8Rows, as_dtype, held_dtype
from libs.engine.model_spec.matrix import DenseMatrix, Fp8Matrix, Int4Matrix
from libs.engine.model_spec.quantization import Fp8Blocks, Int4Groups, Quantization
from libs.engine.model_spec.stored_matrix import StoredMatrix, StoredRows
from libs.engine.step.load_progress import LoadProgress

DENSE_DTYPES = ("F32", "BF16", "F16")
_FP8_SCALE_DTYPES = (*DENSE_DTYPES, "F8_E8M0")
# The largest magnitudes that scales multiply.
_INT4_LARGEST, _FP8_LARGEST = 8.0, 448.0

# Prefixes of the text model's tensor names: Kimi-K2.5, plain DeepSeek-V3, NVFP4 re-exports, none.
TEXT_PREFIXES = ("language_model.model.", "model.", "language_model.", "")

_SAMPLE_BYTES = 4096
_SAMPLES_PER_SHARD = 256


class Checkpoint:
    """The tensors of one model directory. Headers are read at once, values on demand. A context manager.

    Shards are found through `model.safetensors.index.json`, or the one file `model.safetensors`.
    """

    def __init__(self, model_dir: Path, progress: LoadProgress | None = None) -> None:
        """`progress` follows the values that are read."""
        self._headers = read_headers(model_dir)
        self._progress = progress or LoadProgress()
        self._lock = threading.Lock()  # of the progress
        self._reader = ShardReader(model_dir)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def finish(self) -> None:
        """Wait until all rows that are streamed are taken. Raises CheckpointError for the first defect."""
        self._reader.finish()

    def __contains__(self, name: str) -> bool:
        return name in self._headers

    def names(self) -> Iterable[str]:
        return self._headers.keys()

    def expect(self, names: Iterable[str]) -> None:
        """Let the progress be complete once these tensors are read, those of them that are there."""
        found = (self._headers[name] for name in names if name in self._headers)
        self._progress.total_bytes = sum(header.stored_bytes for header in found)

    def header(
        self, name: str, shape: tuple[int, ...] | None = None, dtypes: tuple[str, ...] = ()
    ) -> TensorHeader:
        """Raise CheckpointError when the tensor is missing, or not of `shape`, or of none of `dtypes`."""
        header = self._headers.get(name)
        if header is None:
            raise CheckpointError(name, "not in the checkpoint")
        if shape is not None and header.shape != shape:
            raise CheckpointError(
                name, f"expected shape {list(shape)}, got {list(header.shape)} in {header.shard}"
            )
        if dtypes and header.dtype not in dtypes:
            raise CheckpointError(name, f"expected dtype {' or '.join(dtypes)}, got {header.dtype}")
        return header

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The tensor as stored."""
        header = self.header(name, shape)
        if header.dtype not in DTYPES:
            raise CheckpointError(name, f"dtype {header.dtype} is not supported")
        try:
            found = self._reader.copy(header.shard, header.offset, header.stored_bytes)
        except OSError as error:
            raise CheckpointError(name, f"cannot be read from {header.shard}: {error}") from error
        self._count(header.stored_bytes)
        return torch.from_numpy(np.frombuffer(found, np.uint8)).view(DTYPES[header.dtype]).view(header.shape)

    def dense(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A floating-point tensor of exactly `shape`; fp16 is widened to fp32. All values are finite."""
        self.header(name, shape, DENSE_DTYPES)
        value = self.tensor(name)
        return _finite(name, value.float() if value.dtype == torch.float16 else value)

    def rows(self, name: str, shape: tuple[int, ...], dtype_of: DtypeOf = held_dtype) -> StoredRows:
        """The dense matrix `name`, to be read in pieces, in the dtype for that of its file."""
        self.header(name, shape, DENSE_DTYPES)
        return as_dtype(self._rows(name, partial(_finite, name)), dtype_of)

    def matrix(
        self,
        name: str,
        rows: int,
        cols: int,
        quantization: Quantization | None,
        dtype_of: DtypeOf = held_dtype,
    ) -> StoredMatrix | Int4Matrix:
        """The Linear `name`, of exactly rows x cols, to be read in pieces. INT4 stays INT4.

        Dense and FP8 values come in the dtype for that of their file. INT4 whose groups share words is read
        at once.
        """
        layout = self.layout(name, rows, cols, quantization)
        if layout is Int4Matrix and isinstance(quantization, Int4Groups):
            return self._int4(name, rows, cols, quantization.group_size)
        if layout is Fp8Matrix and isinstance(quantization, Fp8Blocks):
            return StoredMatrix(self._fp8(name, quantization, dtype_of), cols)
        return StoredMatrix(self.rows(f"{name}.weight", (rows, cols), dtype_of), cols)

    def layout(
        self, name: str, rows: int, cols: int, quantization: Quantization | None
    ) -> type[DenseMatrix | Int4Matrix | Fp8Matrix]:
        """How the Linear `name` is stored, which its tensors show. Checks their headers."""
        weight, packed = f"{name}.weight", f"{name}.weight_packed"
        if packed in self:
            return self._int4_layout(name, rows, cols, quantization)
        dtype = self.header(weight, (rows, cols), (*DENSE_DTYPES, "F8_E4M3")).dtype
        if dtype != "F8_E4M3":
            return DenseMatrix
        if not isinstance(quantization, Fp8Blocks):
            raise CheckpointError(weight, "FP8, but quantization_config states no FP8 blocks")
        blocks = (-(-rows // quantization.rows), -(-cols // quantization.cols))
        self.header(f"{name}.weight_scale_inv", blocks, _FP8_SCALE_DTYPES)
        return Fp8Matrix

    def text_prefix(self) -> str:
        """The prefix under which `embed_tokens` and `layers` are stored."""
        for prefix in TEXT_PREFIXES:
            if f"{prefix}embed_tokens.weight" in self:
                return prefix
        raise CheckpointError("model.embed_tokens.weight", "not in the checkpoint under any known prefix")

    def head_name(self) -> str | None:
        """Name of the output head's weight, or None when it is not stored (tied to the embedding)."""
        names = ("language_model.lm_head.weight", "lm_head.weight")
        return next((name for name in names if name in self), None)

    def _int4_layout(
        self, name: str, rows: int, cols: int, quantization: Quantization | None
    ) -> type[Int4Matrix]:
        packed = f"{name}.weight_packed"
        if not isinstance(quantization, Int4Groups):
            raise CheckpointError(packed, "packed INT4, but quantization_config states no INT4 groups")
        if cols % quantization.group_size:
            raise CheckpointError(packed, f"group size {quantization.group_size} does not divide {cols}")
        self.header(packed, (rows, -(-cols // 8)), ("I32",))
        self.header(f"{name}.weight_scale", (rows, cols // quantization.group_size), DENSE_DTYPES)
        if f"{name}.weight_shape" in self:
            self.header(f"{name}.weight_shape", (2,), ("I32", "I64"))
        return Int4Matrix

    def _int4(self, name: str, rows: int, cols: int, group: int) -> StoredMatrix | Int4Matrix:
        packed, scale, shape = (f"{name}.weight_{part}" for part in ("packed", "scale", "shape"))
        if shape in self:
            self._reader.submit(partial(self._check_shape, shape, rows, cols))
        scales = as_dtype(self._rows(scale, partial(_scale, scale, largest=_INT4_LARGEST)), held_dtype)
        words = self._rows(packed, lambda words: words)
        if group % 8:
            return Int4Matrix(words.read(), scales.read(), cols, group)
        return StoredMatrix(words, cols, scales, group)

    def _check_shape(self, name: str, rows: int, cols: int) -> None:
        stored = [int(extent) for extent in self.tensor(name)]
        if stored != [rows, cols]:
            raise CheckpointError(name, f"expected {[rows, cols]}, got {stored}")

    def _rows(self, name: str, check: Callable[[torch.Tensor], torch.Tensor]) -> TensorRows:
        return TensorRows.of(RowSource(name, self._headers[name], self._reader, self._count, check))

    def _count(self, n_bytes: int) -> None:
        with self._lock:
            self._progress.done_bytes += n_bytes

    def _fp8(self, name: str, block: Fp8Blocks, dtype_of: DtypeOf) -> Fp8Rows:
        factors = BlockFactors(partial(self._factors, f"{name}.weight_scale_inv"))
        stored = self._rows(f"{name}.weight", partial(_finite_fp8, f"{name}.weight"))
        return Fp8Rows(stored, dtype_of(stored.dtype), factors, block)

    def _factors(self, name: str) -> torch.Tensor:
        factors = _scale(name, self.tensor(name).float(), _FP8_LARGEST)
        if bool((factors < 0).any()):
            raise CheckpointError(name, "has a scale below 0")
        return factors


def _finite(name: str, value: torch.Tensor) -> torch.Tensor:
    """The smallest and the largest value are NaN when any is; this costs one pass, at memory speed."""
    low, high = (float(bound) for bound in torch.aminmax(value))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise _not_finite(name, value)
    return value


def _finite_fp8(name: str, value: torch.Tensor) -> torch.Tensor:
    """e4m3 has no infinity, and one NaN of each sign."""
    if int(value.view(torch.uint8).bitwise_and(0x7F).max()) == 0x7F:
        raise _not_finite(name, value.float())
    return value


def _scale(name: str, scale: torch.Tensor, largest: float) -> torch.Tensor:
    """Scales whose products with the stored values are finite in fp32; fp16 is widened."""
    scale = scale.float() if scale.dtype == torch.float16 else scale
    if not math.isfinite(float(_finite(name, scale).abs().max().float() * largest)):
        raise CheckpointError(name, f"has a scale that makes weights infinite: {float(scale.abs().max()):g}")
    return scale


def _not_finite(name: str, value: torch.Tensor) -> CheckpointError:
    at = (~torch.isfinite(value)).nonzero()
    return CheckpointError(
        name, f"{len(at)} of {value.numel()} values are NaN or infinite, the first at {at[0].tolist()}"
    )


def weights_digest(model_dir: Path) -> str:
    """Hex BLAKE2b-128 over config, headers and evenly spaced samples of every shard.

    Equal checkpoints have equal digests; any retraining changes them. Reading every byte of a 595 GB
    checkpoint at each start would cost minutes. So the digest detects mix-ups, but no tampering.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update((model_dir / "config.json").read_bytes())
    for shard in shard_names(model_dir):
        path = model_dir / shard
        if not path.is_file():  # a pipe would block
            raise CheckpointError(shard, f"cannot be read: no file in {model_dir}")
        n_bytes = path.stat().st_size
        digest.update(f"{shard}:{n_bytes}\0".encode())
        with path.open("rb") as file:
            read_no_further(file.fileno())
            header_bytes = 8 + int.from_bytes(file.read(8), "little")
            file.seek(0)
            digest.update(file.read(min(header_bytes, 8 + MAX_HEADER_BYTES, n_bytes)))
            for offset in _sample_offsets(header_bytes, n_bytes):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _sample_offsets(start: int, end: int) -> Iterable[int]:
    step = max(_SAMPLE_BYTES, -(-(end - start) // _SAMPLES_PER_SHARD))
    return range(start, end, step)

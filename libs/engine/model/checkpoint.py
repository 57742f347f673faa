"""Reads a sharded safetensors checkpoint by tensor name, and checks shapes and dtypes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from libs.engine.model_spec.matrix import DenseMatrix, Int4Matrix, Matrix
from slipstream.errors import FailedPrecondition

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DENSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Prefixes of the text model's tensor names: Kimi-K2.5, plain DeepSeek-V3, NVFP4 re-exports, none.
TEXT_PREFIXES = ("language_model.model.", "model.", "language_model.", "")

_SAMPLE_BYTES = 4096
_SAMPLES_PER_SHARD = 256


class CheckpointError(FailedPrecondition):
    """The checkpoint lacks a tensor, or holds one of the wrong shape or dtype. `tensor` names it."""

    def __init__(self, tensor: str, reason: str) -> None:
        super().__init__(f"{tensor}: {reason}")
        self.tensor = tensor
        self.reason = reason


class Checkpoint:
    """The tensors of one model directory, read on demand. Use as a context manager.

    Shards are found through `model.safetensors.index.json`, or the one file `model.safetensors`.
    """

    def __init__(self, model_dir: Path) -> None:
        self._dir = model_dir
        self._files: dict[str, Any] = {}
        self._shard_of = _weight_map(model_dir)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def names(self) -> Iterable[str]:
        return self._shard_of.keys()

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The tensor as stored. Raises CheckpointError when it is missing or not of `shape`."""
        shard = self._shard_of.get(name)
        if shard is None:
            raise CheckpointError(name, "not in the checkpoint")
        try:
            value: torch.Tensor = self._open(shard).get_tensor(name)
        except Exception as error:  # safetensors raises its own SafetensorError, OSError and others
            raise CheckpointError(name, f"cannot be read from {shard}: {error}") from error
        if shape is not None and tuple(value.shape) != shape:
            raise CheckpointError(name, f"expected shape {list(shape)}, got {list(value.shape)} in {shard}")
        return value

    def dense(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A floating-point tensor of exactly `shape`; fp16 is widened to fp32."""
        value = self.tensor(name, shape)
        if value.dtype not in DENSE_DTYPES:
            raise CheckpointError(name, f"expected a float dtype of {DENSE_DTYPES}, got {value.dtype}")
        return value.float() if value.dtype == torch.float16 else value

    def matrix(self, name: str, rows: int, cols: int, group: int) -> Matrix:
        """The Linear `name`: INT4 iff `<name>.weight_packed` is stored, else dense `<name>.weight`."""
        if f"{name}.weight_packed" not in self:
            return DenseMatrix(self.dense(f"{name}.weight", (rows, cols)))
        if cols % group:
            raise CheckpointError(f"{name}.weight_packed", f"group size {group} does not divide {cols}")
        packed = self.tensor(f"{name}.weight_packed", (rows, -(-cols // 8)))
        if packed.dtype != torch.int32:
            raise CheckpointError(f"{name}.weight_packed", f"expected int32, got {packed.dtype}")
        scale = self.dense(f"{name}.weight_scale", (rows, cols // group))
        if f"{name}.weight_shape" in self:
            stored = [int(extent) for extent in self.tensor(f"{name}.weight_shape", (2,))]
            if stored != [rows, cols]:
                raise CheckpointError(f"{name}.weight_shape", f"expected {[rows, cols]}, got {stored}")
        return Int4Matrix(packed, scale, cols, group)

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

    def _open(self, shard: str) -> Any:
        if shard not in self._files:
            self._files[shard] = safe_open(self._dir / shard, framework="pt")
        return self._files[shard]


def weights_digest(model_dir: Path) -> str:
    """Hex BLAKE2b-128 over config, headers and evenly spaced samples of every shard.

    Equal checkpoints have equal digests; any retraining changes them. Reading every byte of a 595 GB
    checkpoint at each start would cost minutes. So the digest detects mix-ups, but no tampering.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update((model_dir / "config.json").read_bytes())
    for shard in sorted(set(_weight_map(model_dir).values())):
        path = model_dir / shard
        n_bytes = path.stat().st_size
        digest.update(f"{shard}:{n_bytes}\0".encode())
        with path.open("rb") as file:
            header_bytes = 8 + int.from_bytes(file.read(8), "little")
            file.seek(0)
            digest.update(file.read(min(header_bytes, n_bytes)))
            for offset in _sample_offsets(header_bytes, n_bytes):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _sample_offsets(start: int, end: int) -> Iterable[int]:
    step = max(_SAMPLE_BYTES, -(-(end - start) // _SAMPLES_PER_SHARD))
    return range(start, end, step)


def _weight_map(model_dir: Path) -> dict[str, str]:
    """Tensor name -> shard file name."""
    index = model_dir / INDEX_NAME
    if index.is_file():
        try:
            mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(INDEX_NAME, f"not an index with a weight_map: {error!r}") from error
        if not isinstance(mapping, dict):
            raise CheckpointError(INDEX_NAME, "weight_map is not an object")
        for shard in set(mapping.values()):
            # A shard is a file of this directory: an index must not reach outside it.
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(INDEX_NAME, f"shard {shard!r} is not a plain file name")
        return mapping
    single = model_dir / SINGLE_NAME
    if not single.is_file():
        raise CheckpointError(INDEX_NAME, f"neither it nor {SINGLE_NAME} is in {model_dir}")
    try:
        with safe_open(single, framework="pt") as file:
            return {name: SINGLE_NAME for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own SafetensorError, OSError and others
        raise CheckpointError(SINGLE_NAME, f"cannot be read: {error}") from error

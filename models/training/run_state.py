"""Checkpoints of a running training: named tensors in safetensors, replaced atomically."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def save_run(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes all tensors, then renames: a crash leaves the previous checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial)
    os.replace(partial, path)


def load_run(path: Path) -> dict[str, Tensor]:
    """Reads what `save_run` wrote."""
    return load_file(path)


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under `prefix` + name."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with names that start with `prefix`, under their names without it."""
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}

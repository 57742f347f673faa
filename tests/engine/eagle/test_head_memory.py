"""The estimate of a head's memory holds the tensors of a loaded head and of its contexts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from libs.engine.core.build import build_drafter
from libs.engine.eagle.context import DraftContext
from libs.engine.eagle.head_memory import read_head_memory
from libs.engine.kernels.gpu.triton_kernels import TritonKernels
from libs.engine.model.feature_head import load_feature_head
from libs.engine.model_spec.config import load_config
from libs.engine.step.types import FEATURE_WINDOW_TOKENS
from tests.engine.eagle.random_heads import WRITERS
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

_SMALL_BYTES = 4096  # frequencies, and what allocators round


def tensors_in(part: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for each in part:
            yield from tensors_in(each, seen)
    elif type(part).__module__.startswith("libs.engine") and id(part) not in seen:
        seen.add(id(part))
        names = getattr(type(part), "__slots__", ()) or vars(part)
        for name in names:
            yield from tensors_in(getattr(part, name), seen)


def held_bytes(*parts: Any) -> int:
    storages = {}
    for tensor in tensors_in(list(parts), set()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", WRITERS)
def test_the_estimate_is_what_a_head_and_its_contexts_hold(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    WRITERS[kind](tmp_path / "head")
    (tmp_path / "target").mkdir()
    name: Literal["float32", "bfloat16"] = "bfloat16" if dtype == torch.bfloat16 else "float32"
    write_random_checkpoint(tmp_path / "target", RandomCheckpoint(dtype=name))
    kernels = TritonKernels(torch.device("cpu"), dtype)
    head = build_drafter(tmp_path / "head", tmp_path / "target", kernels=kernels)._head
    memory = read_head_memory(tmp_path / "head", value_bytes=dtype.itemsize)
    assert abs(memory.weight_bytes - held_bytes(head)) < _SMALL_BYTES
    like = torch.zeros(1, dtype=kernels.dtype)
    features = load_feature_head(tmp_path / "head", load_config(tmp_path / "target"), kernels)
    assert memory.feature_bytes == held_bytes(features)
    assert memory.context_bytes == held_bytes(DraftContext(head.config.kv_shape, FEATURE_WINDOW_TOKENS, like))
    assert memory.n_bytes(3) == memory.weight_bytes + 3 * memory.context_bytes + memory.pass_bytes

"""The chain in one call drafts what single operations draft, in every variant of the library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from libs.engine.eagle.drafter import DrafterEngine
from libs.engine.eagle.head import EagleHead
from libs.engine.kernels.interface import Kernels
from libs.engine.kernels.library import load_library, processor_level
from libs.engine.kernels.native import NativeKernels
from libs.engine.kernels.torch_kernels import TorchKernels
from tests.engine.random_head import RandomHead, write_random_head
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

SPECS = {
    "grouped": RandomHead(),
    "narrow": RandomHead(n_heads=3, n_kv_heads=1, head_dim=6),
    "wide": RandomHead(n_heads=2, n_kv_heads=2, head_dim=80, draft_vocab_size=99),
    "norms": RandomHead(extra=(("norm_before_residual", True), ("norm_output", True))),
}
LENGTHS = (1, 40, 7, 90, 2, 15, 33)


def filled(path: Path, kernels: Kernels) -> DrafterEngine:
    """A drafter with contexts of several lengths, that begin at several positions."""
    drafter = DrafterEngine(EagleHead.load(path / "head", path / "target", kernels), window_tokens=64)
    rng = np.random.default_rng(7)
    for i, n in enumerate(LENGTHS):
        tokens = rng.integers(0, 256, n).astype(np.uint32)
        drafter.extend(str(i), 3 * i, tokens[:64], rng.normal(size=(n, 64)).astype(np.float32)[:64])
    return drafter


def write(path: Path, spec: RandomHead, *, bf16: bool) -> None:
    (path / "head").mkdir()
    (path / "target").mkdir()
    write_random_head(path / "head", spec)
    write_random_checkpoint(path / "target", RandomCheckpoint(dtype="float32"))
    if bf16:
        (file,) = (path / "head").glob("*.safetensors")
        tensors = load_file(file)
        floats = {name for name, tensor in tensors.items() if tensor.is_floating_point()}
        save_file({n: t.bfloat16() if n in floats else t for n, t in tensors.items()}, file)


@pytest.mark.parametrize("level", range(2, processor_level() + 1))
@pytest.mark.parametrize("name", SPECS)
def test_drafts_equal_those_of_single_operations(tmp_path: Path, name: str, level: int) -> None:
    write(tmp_path, SPECS[name], bf16=False)
    names = list(map(str, range(len(LENGTHS))))
    expected = filled(tmp_path, TorchKernels())
    found = filled(tmp_path, NativeKernels(load_library(level), 2))
    lengths = set[int]()
    for least in (0.0, 1e-6, 1e-4, 1e-2, 1.1):
        drafts = found.propose_batch(names, 9, min_confidence=least)
        assert drafts == expected.propose_batch(names, 9, min_confidence=least)
        assert drafts["3"] == found.propose_batch(["3"], 9, min_confidence=least)["3"]
        lengths |= set(map(len, drafts.values()))
    assert {0, 9} < lengths


def test_an_embedding_in_bf16_is_widened(tmp_path: Path) -> None:
    write(tmp_path, RandomHead(), bf16=True)
    names = list(map(str, range(len(LENGTHS))))
    found = filled(tmp_path, NativeKernels(load_library(2), 1))
    assert found.propose_batch(names, 5) == filled(tmp_path, TorchKernels()).propose_batch(names, 5)

"""Draft heads on the Triton programs, in the interpreter, against the same heads on the kernels of a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from libs.engine.core.build import build_drafter
from libs.engine.eagle.drafter import DrafterEngine
from libs.engine.kernels.device import open_triton_kernels
from libs.engine.kernels.interface import Kernels
from libs.engine.kernels.torch_kernels import TorchKernels
from tests.engine.eagle.random_heads import WRITERS, extend_heads
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

WINDOW_TOKENS = 48


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_random_checkpoint(path, RandomCheckpoint(dtype="float32"))
    return path


def load(head_dir: Path, target_dir: Path, kernels: Kernels) -> DrafterEngine:
    head = build_drafter(head_dir, target_dir, kernels=kernels)._head
    return DrafterEngine(head, window_tokens=WINDOW_TOKENS)


@pytest.mark.parametrize("kind", WRITERS)
def test_drafts_equal_those_of_a_cpu(tmp_path: Path, target_dir: Path, kind: str) -> None:
    """Contexts of different lengths, padded to one; chains and blocks end at the same draft."""
    WRITERS[kind](tmp_path)
    kernels = open_triton_kernels(torch.device("cpu"), torch.float32)
    on_cpu, on_device = load(tmp_path, target_dir, TorchKernels()), load(tmp_path, target_dir, kernels)
    names = extend_heads([on_cpu, on_device], seed=1)
    wanted = on_cpu.propose_batch(names, 5)
    assert on_device.propose_batch(names, 5) == wanted
    assert on_device.propose_batch(names, 5) == wanted  # drafts leave contexts as they were
    lengths = set()
    for least in (0.001, 0.03):
        sure = on_cpu.propose_batch(names, 5, min_confidence=least)
        assert on_device.propose_batch(names, 5, min_confidence=least) == sure
        lengths |= {len(drafts) for drafts in sure.values()}
    assert len(lengths) > 1


def test_more_contexts_than_one_buffer_holds(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS["grouped"](tmp_path)
    kernels = open_triton_kernels(torch.device("cpu"), torch.float32)
    drafter = load(tmp_path, target_dir, kernels)
    names = extend_heads([drafter], seed=2)
    wanted = drafter.propose_batch(names, 3)
    monkeypatch.setattr("libs.engine.eagle.context_head.PADDED_CONTEXTS", 3)
    assert len(names) > 3
    assert drafter.propose_batch(names, 3) == wanted

"""Drafts of a head on torch's meta device: until they are read, no operation waits for the device.

The modes are those of `tests/engine/graphs/test_captured_operations.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from libs.engine.core.build import build_drafter
from libs.engine.eagle.attended import PaddedRows
from libs.engine.eagle.block_head import BlockHead
from libs.engine.eagle.context import DraftContext, join_inputs
from libs.engine.eagle.context_head import ContextHead
from libs.engine.eagle.drafted import read_drafts
from libs.engine.eagle.head import EagleHead
from libs.engine.kernels.gpu.triton_kernels import TritonKernels
from tests.engine.eagle.random_heads import WRITERS
from tests.engine.graphs.test_captured_operations import CapturedOperations, NoHostValues
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

DEVICE = torch.device("meta")
N_DRAFTS = 4


@pytest.fixture(autouse=True)
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs have no values to read or write."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *args, **kwargs: None)


def meta_head(path: Path, kind: str) -> ContextHead:
    WRITERS[kind](path / "head")
    (path / "target").mkdir()
    write_random_checkpoint(path / "target", RandomCheckpoint())
    kernels = TritonKernels(DEVICE)
    return build_drafter(path / "head", path / "target", kernels=kernels)._head


def filled_contexts(head: ContextHead) -> list[DraftContext]:
    """Two contexts; their rows are on the device already. Nothing here may wait."""
    n_rows, contexts = 7, []
    features = torch.empty(n_rows, 64, device=DEVICE)
    ids = torch.empty(n_rows, dtype=torch.int64, device=DEVICE)
    inputs, rows = head.project_rows(features, ids, ids)
    for part in (slice(0, 3), slice(3, 7)):
        context = DraftContext(head.config.kv_shape, 8, rows.keys, is_padded=True)
        for start in (0, 3):  # the second time the rows replace some, or move to the front
            context.append(start, rows.keys[part], rows.values[part])
        context.newest = None if inputs is None else inputs.row(part.stop - 1)
        contexts.append(context)
    return contexts


def draft(head: Any, contexts: list[DraftContext], rows: PaddedRows) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(head, BlockHead):
        ids = torch.empty(len(contexts), N_DRAFTS + 1, dtype=torch.int64, device=DEVICE)
        return head.block(ids, ids, rows)
    assert isinstance(head, EagleHead)
    positions = torch.empty(len(contexts), dtype=torch.int64, device=DEVICE)
    inputs = join_inputs([context.newest_row() for context in contexts])
    return head.chain(rows, inputs, positions, N_DRAFTS)


@pytest.mark.parametrize("kind", WRITERS)
@torch.inference_mode()
def test_drafts_wait_for_the_device_only_when_they_are_read(tmp_path: Path, kind: str) -> None:
    head = meta_head(tmp_path, kind)
    with NoHostValues(), CapturedOperations() as taken:
        contexts = filled_contexts(head)
    rows = PaddedRows(contexts, N_DRAFTS + 1)  # copies masks from the host, pinned: see `upload`
    with NoHostValues(), CapturedOperations() as captured:
        tokens, likely = draft(head, contexts, rows)
    assert taken.n_operations > 10 and captured.n_operations > 20
    assert tokens.shape == likely.shape == (2, N_DRAFTS) and tokens.device == likely.device == DEVICE
    with pytest.raises((NotImplementedError, RuntimeError)):
        read_drafts(tokens, likely, 0.0)

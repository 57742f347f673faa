"""Tiny models on the Triton programs, with steps on fixed buffers that run as plain calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from libs.engine.core.torch_model import TorchModel
from libs.engine.graphs.step_graphs import PlainSteps, StepGraphs
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.step.batch import ForwardBatch
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

BLOCK_TOKENS = 16
SHAPE = {"num_hidden_layers": 2, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2, "topk_group": 1}


def write_checkpoint(path: Path, **fields: Any) -> Path:
    """`fields` of config.json."""
    write_random_checkpoint(path, RandomCheckpoint(TINY_CONFIG | SHAPE | fields, quantization="int4"))
    return path


def load_runner(path: Path, *, n_pages: int, head_dir: Path | None = None) -> ModelRunner:
    options = RunnerOptions(
        n_pages=n_pages,
        block_tokens=BLOCK_TOKENS,
        kernels="triton",
        kv_dtype="float32",
        compute_dtype="float32",
        head_dir=head_dir,
    )
    return ModelRunner.load(path, options)


def make_model(
    runner: ModelRunner, *, max_batch: int = 8, max_draft_tokens: int = 3, graphs: StepGraphs | None = None
) -> TorchModel:
    return TorchModel(
        runner,
        max_batch=max_batch,
        max_draft_tokens=max_draft_tokens,
        max_context_tokens=640,
        graphs=graphs or PlainSteps(),
    )


def decode_batch(rows: list[int], contexts: list[int], *, seed: int, n_blocks: int) -> ForwardBatch:
    """Sampled rows at the ends of contexts, each in pages of its sequence, in a shuffled order."""
    random = np.random.default_rng(seed)
    n_rows = sum(rows)
    return ForwardBatch(
        token_ids=random.integers(0, 256, n_rows).astype(np.int32),
        positions=np.concatenate([np.arange(c - n, c) for n, c in zip(rows, contexts, strict=True)]).astype(
            np.int32
        ),
        query_start=np.concatenate(([0], np.cumsum(rows))).astype(np.int32),
        context_len=np.array(contexts, np.int32),
        page_table=random.permutation(len(rows) * n_blocks).reshape(-1, n_blocks).astype(np.int32),
        logit_rows=np.arange(n_rows, dtype=np.int32),
    )


def multiply_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a row of torch's products the same bits beside any number of others.

    Libraries choose an algorithm by the number of rows, which is not what these tests are about.
    """
    linear, bmm = torch.nn.functional.linear, torch.bmm

    def rows_of_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(row, weight) for row in torch.split(x, 1)])

    def rows_of_bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([bmm(row, b) for row in torch.split(a, 1, dim=1)], dim=1)

    monkeypatch.setattr(torch.nn.functional, "linear", rows_of_linear)
    monkeypatch.setattr(torch, "bmm", rows_of_bmm)

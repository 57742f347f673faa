"""A whole model on the Triton programs, in the interpreter, against the same model on torch's operations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.step.batch import ForwardBatch
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

# Sequences of more than 10 rows take the expanded form in this shape.
SHAPE = {"num_hidden_layers": 2, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2, "topk_group": 1}
PAGES = [[4, 1, 3], [2, 0, 5]]


def batch(
    rows: list[int], contexts: list[int], *, seed: int, pages: list[list[int]] | None = None
) -> ForwardBatch:
    n_rows = sum(rows)
    return ForwardBatch(
        token_ids=np.random.default_rng(seed).integers(0, 256, n_rows).astype(np.int32),
        positions=np.concatenate([np.arange(c - n, c) for n, c in zip(rows, contexts, strict=True)]),
        query_start=np.concatenate(([0], np.cumsum(rows))).astype(np.int32),
        context_len=np.array(contexts, np.int32),
        page_table=np.array(pages or PAGES, np.int32),
        logit_rows=np.arange(n_rows, dtype=np.int32),
    )


@pytest.mark.parametrize("quantization", ["int4", "none"])
def test_logits_equal_those_of_torch(tmp_path: Path, quantization: Literal["int4", "none"]) -> None:
    """Two prompts, one for each form of attention; then three verify rows and one decode row."""
    write_random_checkpoint(tmp_path, RandomCheckpoint(TINY_CONFIG | SHAPE, quantization=quantization))
    reference = ModelRunner.load(
        tmp_path, RunnerOptions(n_pages=6, block_tokens=16, kernels="torch", kv_dtype="float32")
    )
    triton = ModelRunner.load(
        tmp_path,
        RunnerOptions(
            n_pages=6, block_tokens=16, kernels="triton", kv_dtype="float32", compute_dtype="float32"
        ),
    )
    for step in (batch([2, 20], [2, 20], seed=1), batch([3, 1], [5, 21], seed=2)):
        wanted, actual = reference.forward(step), triton.forward(step)
        np.testing.assert_allclose(actual.logits, wanted.logits, rtol=2e-4, atol=2e-4)


def test_a_row_of_several_splits_beside_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits have results of the rows in the absorbed form, and none of the prompt's."""
    from libs.engine.kernels.gpu import mla_decode

    write_random_checkpoint(tmp_path, RandomCheckpoint(TINY_CONFIG | SHAPE))
    options = RunnerOptions(
        n_pages=42, block_tokens=16, kernels="torch", kv_dtype="float32", compute_dtype="float32"
    )
    reference = ModelRunner.load(tmp_path, options)
    triton = ModelRunner.load(tmp_path, replace(options, kernels="triton"))
    monkeypatch.setattr(triton.loaded_kernels, "_processors", 8)
    reference.cache.pages.normal_(generator=torch.Generator().manual_seed(1))
    triton.cache.pages.copy_(reference.cache.pages)
    merged: list[torch.Tensor] = []
    merge = mla_decode._merge_program

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(parts: torch.Tensor, *others: Any, **constants: Any) -> None:
                merged.append(parts)
                merge[grid](parts, *others, **constants)

            return launch

    monkeypatch.setattr(mla_decode, "_merge_program", Recorded())
    pages = np.random.default_rng(2).permutation(42).reshape(2, 21).tolist()
    step = batch([20, 2], [20, 330], seed=3, pages=pages)
    wanted, actual = reference.forward(step), triton.forward(step)
    np.testing.assert_allclose(actual.logits, wanted.logits, rtol=2e-4, atol=2e-4)
    assert {tuple(parts.shape[:2]) for parts in merged} == {(2, 2)}  # splits, rows

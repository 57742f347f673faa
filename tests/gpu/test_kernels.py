"""The Triton programs on a device: against torch's operations in fp32, and the sampler against the CPU's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.sampling.sampler import sample
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.step_model import SequenceRows
from libs.engine.step.types import SamplingParams
from tests.support.random_checkpoint import BENCH_CONFIG, RandomCheckpoint, write_random_checkpoint

pytestmark = pytest.mark.gpu


def batch(rows: list[int], contexts: list[int], *, seed: int) -> ForwardBatch:
    n_rows = sum(rows)
    n_blocks = 16
    return ForwardBatch(
        token_ids=np.random.default_rng(seed).integers(0, 4096, n_rows).astype(np.int32),
        positions=np.concatenate([np.arange(c - n, c) for n, c in zip(rows, contexts, strict=True)]),
        query_start=np.concatenate(([0], np.cumsum(rows))).astype(np.int32),
        context_len=np.array(contexts, np.int32),
        page_table=np.random.default_rng(0)
        .permutation(len(rows) * n_blocks)
        .reshape(-1, n_blocks)
        .astype(np.int32),
        logit_rows=np.arange(n_rows, dtype=np.int32),
    )


def relative_errors(actual: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of each row of logits [R, V]: [R] fp64."""
    difference = actual.cpu().double() - wanted.double()
    errors: torch.Tensor = difference.norm(dim=1) / wanted.double().norm(dim=1)
    return errors


@pytest.mark.parametrize("quantization", ["int4", "none"])
@pytest.mark.parametrize(("compute_dtype", "bound"), [("float32", 1e-4), ("auto", 3e-2)])
def test_logits_are_near_those_of_torch(
    cuda: str, tmp_path: Path, quantization: str, compute_dtype: str, bound: float
) -> None:
    """Prompts in both forms of attention, then decode and verify rows over contexts of several splits.

    In bf16 a near tie of the router takes another expert, which changes whole rows: the median row counts.
    """
    write_random_checkpoint(tmp_path, RandomCheckpoint(BENCH_CONFIG, quantization=quantization))  # type: ignore[arg-type]
    kv_dtype = "float32" if compute_dtype == "float32" else "bfloat16"
    reference = ModelRunner.load(
        tmp_path, RunnerOptions(n_pages=64, kernels="torch", kv_dtype=kv_dtype)  # type: ignore[arg-type]
    )  # fmt: skip
    on_device = ModelRunner.load(
        tmp_path,
        RunnerOptions(n_pages=64, device=cuda, kv_dtype=kv_dtype, compute_dtype=compute_dtype),  # type: ignore[arg-type]
    )
    assert on_device.kernels == "triton"
    for step in (batch([900, 20], [900, 20], seed=1), batch([8, 1], [908, 21], seed=2)):
        wanted, actual = reference.forward(step), on_device.forward(step)
        assert actual.logits.device == torch.device(cuda)
        errors = relative_errors(actual.logits, wanted.logits)
        assert errors.isfinite().all()
        assert errors.quantile(1.0 if compute_dtype == "float32" else 0.5) < bound


def test_the_sampler_gives_the_tokens_of_the_cpu(cuda: str) -> None:
    """Penalties, bias, top-k, top-p and min-p on rows of random logits."""
    params = [
        SamplingParams(temperature=0.0, logit_bias={7: 3.0}),
        SamplingParams(temperature=0.8, seed=3, top_k=40, presence_penalty=0.5, frequency_penalty=0.3),
        SamplingParams(temperature=1.2, seed=4, top_p=0.9, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, seed=5, min_p=0.02, logprobs=3),
    ]
    rows = [
        SequenceRows(
            seq_id=str(index),
            tokens=np.array([1, 2, 3, 5, 9], np.uint32),
            pages=(0,),
            n_rows=1,
            n_sampled=1,
            n_prompt=3,
            first_index=2,
            params=each,
            output_counts={5: 1, 9: 1},
            prompt_ids=np.array([1, 2, 3], np.int64) if each.repetition_penalty != 1.0 else None,
        )
        for index, each in enumerate(params)
    ]
    logits = torch.randn(len(rows), 163840, generator=torch.Generator().manual_seed(1)) * 3
    wanted, wanted_logprobs = sample(logits.clone(), rows)
    actual, logprobs = sample(logits.to(cuda), rows)
    assert actual == wanted
    assert logprobs is not None and wanted_logprobs is not None
    assert logprobs[3] is not None and wanted_logprobs[3] is not None
    assert logprobs[3].logprob == pytest.approx(wanted_logprobs[3].logprob, abs=1e-4)

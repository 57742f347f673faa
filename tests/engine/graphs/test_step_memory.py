"""The estimate of what decode steps take of a device, against the tensors that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from bench.gpu.cases.random_model import RandomModel
from bench.gpu.counting.model_shapes import kimi_k25_cut, moonlight
from libs.engine.graphs.buckets import BucketLimits, planned_buckets
from libs.engine.graphs.decode_steps import DecodeSteps
from libs.engine.graphs.step_graphs import PlainStep
from libs.engine.graphs.step_memory import StepMemory, estimate_step_memory
from libs.engine.kernels.gpu.triton_kernels import TritonKernels
from libs.engine.model_spec.config import ModelConfig
from tests.support.live_bytes import peak_bytes_of

PROCESSORS = 132
CONTEXT, BLOCK = 8192, 64


class NoSteps:
    def capture(self, name: str, step: Callable[[], None]) -> PlainStep:
        return PlainStep(lambda: None)


def steps_of(config: ModelConfig, limits: BucketLimits) -> DecodeSteps:
    """Of two layers on torch's meta device: the others of a model use the same memory again."""
    runner = RandomModel(replace(config, n_layers=2), torch.device("meta")).runner(
        n_pages=8, block_tokens=BLOCK
    )
    kernels = runner.loaded_kernels
    assert isinstance(kernels, TritonKernels)
    kernels._processors = PROCESSORS
    return DecodeSteps(runner, kernels, NoSteps(), limits, max_context_tokens=CONTEXT)


def estimate(config: ModelConfig, limits: BucketLimits) -> StepMemory:
    return estimate_step_memory(
        limits, vocab_size=config.vocab_size, feature_width=0, n_blocks=CONTEXT // BLOCK
    )


@pytest.mark.parametrize("limits", [BucketLimits(64), BucketLimits(64, 9)], ids=["decode", "drafts"])
@pytest.mark.parametrize("config", [moonlight(), kimi_k25_cut()], ids=["Moonlight", "Kimi-K2.5"])
def test_the_estimate_has_room_for_the_largest_step_and_little_more(
    config: ModelConfig, limits: BucketLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *args, **kwargs: None)
    steps, bucket = steps_of(config, limits), planned_buckets(limits)[0]
    steps._inputs_of(bucket)
    peaks = [
        peak_bytes_of(partial(steps._compute, bucket)),
        peak_bytes_of(partial(steps._choose, bucket.shape, True, True)),
    ]
    assert min(peaks) > bucket.n_rows * config.vocab_size * 4, "both make logits"
    wanted = estimate(config, limits).pool_bytes
    assert max(peaks) <= wanted <= 1.3 * max(peaks)


@pytest.mark.parametrize("limits", [BucketLimits(64), BucketLimits(64, 9)], ids=["decode", "drafts"])
def test_the_estimate_has_room_for_the_buffers_and_little_more(limits: BucketLimits) -> None:
    steps = steps_of(moonlight(), limits)
    inputs = [steps._inputs_of(bucket) for bucket in planned_buckets(limits)]
    held = sum(tensor.nbytes for tensor in (steps.logits, steps.features, steps.tokens))
    held += sum(each._memory.nbytes for each in {id(each): each for each in inputs}.values())
    assert held <= estimate(moonlight(), limits).buffer_bytes <= 1.1 * held


@given(max_batch=st.integers(1, 512), max_rows_each=st.integers(1, 9))
def test_drafts_and_larger_batches_take_more(max_batch: int, max_rows_each: int) -> None:
    config = moonlight()
    plain = estimate(config, BucketLimits(max_batch)).n_bytes
    assert estimate(config, BucketLimits(max_batch, max_rows_each)).n_bytes >= plain
    assert estimate(config, BucketLimits(max_batch + 1)).n_bytes > plain


def test_without_drafts_no_buffer_has_room_for_them() -> None:
    assert len(steps_of(moonlight(), BucketLimits(64)).logits) == 64
    assert len(steps_of(moonlight(), BucketLimits(64, 9)).logits) == 256

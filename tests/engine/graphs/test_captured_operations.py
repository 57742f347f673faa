"""The captured part of a step, on torch's meta device, whose tensors have shapes and no values.

There is no value to read, so an operation that waits for the device raises. A mode on top refuses copies
between host and device, which a graph would repeat with the bytes of its capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from bench.gpu.cases.random_model import RandomModel
from bench.gpu.counting.model_shapes import tiny
from libs.engine.graphs.buckets import BucketLimits, StepBucket
from libs.engine.graphs.decode_steps import DecodeSteps
from libs.engine.graphs.step_graphs import PlainStep
from libs.engine.kernels.gpu.triton_kernels import TritonKernels

DEVICE = torch.device("meta")


class HostCopyRefused(Exception):
    pass


class CapturedOperations(TorchDispatchMode):
    """Refuses what a capture cannot hold, and counts the rest."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n_operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.n_operations += 1
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            raise HostCopyRefused(str(func))
        indices = args[1] if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) else ()
        if any(index is not None and index.dtype == torch.bool for index in indices):
            raise HostCopyRefused(f"{func} by a mask, whose size the host would need")
        return result


class NoHostValues(TorchFunctionMode):
    """Refuses tensors made of Python values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.tensor, torch.as_tensor):
            raise HostCopyRefused("a tensor of values in the host")
        return func(*args, **(kwargs or {}))


class RecordedSteps:
    """Keeps the steps that would be captured, and runs none."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def capture(self, name: str, step: Callable[[], None]) -> PlainStep:
        self.steps.append(step)
        return PlainStep(lambda: None)


@pytest.fixture(autouse=True)
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What programs write has no values either."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *args, **kwargs: None)


def meta_steps(bucket: StepBucket) -> DecodeSteps:
    """Steps of a model whose tensors are all on the device; the bucket has its inputs."""
    runner = RandomModel(tiny(), DEVICE).runner(n_pages=8, block_tokens=16)
    kernels = runner.loaded_kernels
    assert isinstance(kernels, TritonKernels)
    limits = BucketLimits(bucket.n_sequences, bucket.rows_each)
    steps = DecodeSteps(runner, kernels, RecordedSteps(), limits, max_context_tokens=64)
    steps._inputs_of(bucket)
    return steps


BUCKETS = [StepBucket(1, 1), StepBucket(4, 1), StepBucket(2, 4), StepBucket(128, 1)]


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_a_forward_pass_waits_for_nothing(bucket: StepBucket) -> None:
    """Few pairs of a token and an expert, and many, which are sorted on the device."""
    steps = meta_steps(bucket)
    with NoHostValues(), CapturedOperations() as captured, torch.inference_mode():
        steps._compute(bucket)
    assert captured.n_operations > 50


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
@pytest.mark.parametrize(("draws", "cuts"), [(False, False), (True, False), (True, True)])
def test_a_choice_of_tokens_waits_for_nothing(bucket: StepBucket, draws: bool, cuts: bool) -> None:
    steps = meta_steps(bucket)
    with NoHostValues(), CapturedOperations() as captured, torch.inference_mode():
        steps._choose(bucket, draws, cuts)
    assert captured.n_operations > 3


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: torch.from_numpy(np.zeros(4)).to(x.device),
        lambda x: x.copy_(torch.zeros(4)),
        lambda x: x.repeat_interleave(x.long()),
    ],
    ids=["item", "list", "bool", "nonzero", "mask", "to host", "new", "from numpy", "from host", "repeats"],
)
def test_what_a_graph_cannot_hold_is_refused(waits: Callable[[torch.Tensor], object]) -> None:
    x = torch.zeros(4, device=DEVICE)
    with NoHostValues(), CapturedOperations(), pytest.raises((HostCopyRefused, RuntimeError)):
        waits(x)

"""A group of two devices against one: logits, and pages that pass through the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.parallel.group_runner import GroupRunner
from libs.engine.parallel.sizes import parse_sizes
from tests.engine.parallel.test_group import BATCHES, BLOCK_TOKENS
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-4  # of fp32 on a device, whose products add in another order


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, RandomCheckpoint(dtype="float32"))
    return path


def options(cuda: str) -> RunnerOptions:
    return RunnerOptions(
        n_pages=64, block_tokens=BLOCK_TOKENS, device=cuda, kv_dtype="float32", compute_dtype="float32"
    )


@pytest.fixture(scope="module", params=["tp=2", "pp=2"])
def group(cuda: str, model_dir: Path, request: pytest.FixtureRequest) -> Iterator[GroupRunner]:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one CUDA device")
    runner = GroupRunner.load(model_dir, options(cuda), parse_sizes(request.param))
    yield runner
    runner.close()


def test_logits_and_collected_pages_equal_those_of_one_device(
    cuda: str, model_dir: Path, group: GroupRunner
) -> None:
    one, parts = ModelRunner.load(model_dir, options(cuda)), group.page_parts
    assert parts is not None
    for batch in BATCHES:
        torch.testing.assert_close(
            group.forward(batch).logits, one.forward(batch).logits, rtol=0, atol=TOLERANCE
        )
    written = sorted({int(page) for batch in BATCHES for page in batch.page_table.ravel()})
    parts.collect(written)
    found, wanted = group.cache.pages[written], one.cache.pages[written].cpu()
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


def test_pages_of_a_peer_are_taken_by_both_devices(group: GroupRunner) -> None:
    parts = group.page_parts
    assert parts is not None
    group.cache.pages[5].normal_()
    wanted = group.cache.pages[5].clone()
    parts.scatter([5])
    parts.copy([(5, 6)])
    group.cache.pages[6].zero_()
    parts.collect([6])
    torch.testing.assert_close(group.cache.pages[6], wanted, rtol=0, atol=0)

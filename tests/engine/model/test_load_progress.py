"""The progress of a load ends at the bytes of the tensors that the model takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.step.load_progress import LoadProgress
from tests.engine.model.test_inventory import CONFIG
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

SPECS = (
    RandomCheckpoint(config=CONFIG, quantization="none"),
    RandomCheckpoint(config=CONFIG, prefix="language_model."),
    RandomCheckpoint(config=CONFIG, quantization="fp8", fp8_block=(16, 16)),
)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.quantization)
def test_every_tensor_that_is_read_counts_once(tmp_path: Path, spec: RandomCheckpoint) -> None:
    write_random_checkpoint(tmp_path, spec)
    seen: list[tuple[int, int]] = []
    progress = LoadProgress()

    count = Checkpoint._count

    def note(self: Checkpoint, n_bytes: int) -> None:
        seen.append((n_bytes, progress.total_bytes))
        count(self, n_bytes)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Checkpoint, "_count", note)
        ModelRunner.load(tmp_path, RunnerOptions(n_pages=1, kernels="torch", progress=progress))
    assert 0 < progress.total_bytes == progress.done_bytes
    assert 0 < progress.done_bytes == progress.total_bytes
    assert {total for _, total in seen} == {progress.total_bytes}, (
        "it is known before the first value is read"
    )
    assert sum(n_bytes for n_bytes, _ in seen) == progress.done_bytes

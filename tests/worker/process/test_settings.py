"""The worker's flags that decide what the engine is built on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from libs.engine.model.random_checkpoint import RandomCheckpoint, write_random_checkpoint
from libs.engine.step.load_progress import LoadProgress
from libs.worker.process.settings import ModelUnusable, engine_builder
from services.decode.settings import DecodeSettings


@pytest.mark.parametrize("kv_memory_bytes", [None, 1 << 20])
def test_a_worker_refuses_a_device_that_the_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_memory_bytes: int | None
) -> None:
    """Before it reads weights, and with the reason; the supervisor does not start it again."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    progress = LoadProgress()
    settings = DecodeSettings(instance="d0", model=tmp_path, device="cuda:1", kv_memory_bytes=kv_memory_bytes)
    build = engine_builder(settings, progress)
    with pytest.raises(ModelUnusable, match="device cuda:1: no CUDA device here"):
        build()
    assert progress.done_bytes == 0

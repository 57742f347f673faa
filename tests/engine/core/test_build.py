"""What an engine is built with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from libs.engine.core import build
from libs.engine.core.build import EngineOptions, build_engine
from libs.engine.graphs.buckets import BucketLimits
from libs.engine.graphs.step_memory import estimate_step_memory
from libs.engine.model.runner import RunnerOptions
from libs.engine.model.shards import CheckpointError
from slipstream.errors import InvalidArgument
from tests.engine.random_head import RandomHead, write_random_head
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint


class LoadBegan(Exception):
    pass


@pytest.mark.parametrize(
    ("stated", "counts"),
    [
        ({"device": "cuda", "decode_steps": "plain"}, False),
        ({"device": "cuda", "decode_steps": "graphs"}, True),
        ({"device": "cuda", "decode_steps": "ahead"}, True),
        ({"device": "cpu", "decode_steps": "graphs"}, False),
    ],
)
def test_the_memory_of_graphs_is_counted_before_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: dict[str, Any], counts: bool
) -> None:
    config = write_random_checkpoint(tmp_path, RandomCheckpoint())
    seen: list[RunnerOptions] = []

    def load(model_dir: Path, options: RunnerOptions, parallel: object) -> None:
        seen.append(options)
        raise LoadBegan

    monkeypatch.setattr(build, "_load", load)
    with pytest.raises(LoadBegan):
        build_engine(tmp_path, EngineOptions(n_pages=9, max_batch=16, max_draft_tokens=3, **stated))
    wanted = estimate_step_memory(
        BucketLimits(16, 4),
        vocab_size=config.vocab_size,
        feature_width=0,
        n_blocks=-(-config.max_position_tokens // 64),
    )
    assert [options.step_bytes for options in seen] == [wanted.n_bytes if counts else 0]


def test_refusals_of_a_head_name_its_directory(tmp_path: Path) -> None:
    """The model's directory has files, keys and tensors of the same names."""
    head = tmp_path / "head"
    head.mkdir()
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    write_random_head(head, RandomHead())
    options = EngineOptions(n_pages=4, kernels="torch", draft_model_dir=head, threads=1)
    os.truncate(head / "model.safetensors", 100)
    with pytest.raises(CheckpointError, match=f"^{head / 'model.safetensors'}: cannot be read"):
        build_engine(tmp_path, options)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(InvalidArgument, match=f"^draft_model_dir: {head / 'config.json'}: hidden_act: "):
        build_engine(tmp_path, options)

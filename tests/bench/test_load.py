"""The benchmark of loading: its checkpoints load, and both sides are measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import load
from libs.engine.model.runner import ModelRunner, RunnerOptions


@pytest.mark.parametrize("weight_format", load.FORMATS)
def test_a_checkpoint_has_its_size_and_loads(tmp_path: Path, weight_format: str) -> None:
    n_bytes = load.write_checkpoint(tmp_path, 48e6, weight_format)
    assert n_bytes == pytest.approx(48e6, rel=0.35)
    assert ModelRunner.load(tmp_path, RunnerOptions(n_pages=1)).config.n_layers == 3


def test_both_sides_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_this_process(
        model_dir: Path, packed_dir: Path | None = None, device: str = "cpu"
    ) -> dict[str, float]:
        load.main(["--load", str(model_dir), *(["--packed-dir", str(packed_dir)] if packed_dir else [])])
        found: dict[str, float] = json.loads(capsys.readouterr().out)
        return found

    monkeypatch.setattr(load, "_load_in_child", in_this_process)
    monkeypatch.setattr(load, "_COPY_BYTES", 4 << 20)
    load.main(["--gb", "0.02", "--rounds", "1", "--formats", "int4", "--dir", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)["int4"]
    assert all(found[name] > 0 for name in ("raw_gb_s", "drive_gb_s", "copy_gb_s", "cache_gb_s"))
    assert found["drive_ratio"] > 0 and found["cache_ratio"] > 0
    assert found["packed_drive_ratio"] > 0 and found["packed_cache_ratio"] > 0, "and of the packed file"
    assert not list(tmp_path.iterdir()), "the checkpoint is removed"

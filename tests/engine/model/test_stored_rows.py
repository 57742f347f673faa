"""Weights that are streamed from the files equal those that are read whole, and defects are named."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.model.shard_file import ShardFile
from libs.engine.model.shard_reader import ShardReader
from libs.engine.model.shards import CheckpointError
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.matrix import Int4Matrix
from libs.engine.model_spec.stored_matrix import StoredMatrix
from libs.engine.step.load_progress import LoadProgress
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

EXPERT = "model.layers.1.mlp.experts.0.down_proj"


@pytest.fixture(params=["cached", "direct", "buffered"])
def read_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of reading, whatever is in the page cache and whatever the file system has."""
    if request.param != "cached":
        monkeypatch.setattr(ShardFile, "map_cached", lambda *_: None)
    if request.param == "buffered":
        monkeypatch.delattr(os, "O_DIRECT")


def write(path: Path) -> ModelConfig:
    return write_random_checkpoint(path, RandomCheckpoint(config=TINY_CONFIG))


def stored(checkpoint: Checkpoint, config: ModelConfig, name: str, rows: int, cols: int) -> StoredMatrix:
    matrix = checkpoint.matrix(name, rows, cols, config.quantization)
    assert isinstance(matrix, StoredMatrix)
    return matrix


@pytest.mark.usefixtures("small_pieces", "read_path")
def test_pieces_make_up_the_matrix_and_its_cuts(tmp_path: Path) -> None:
    config = write(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        packed, scale = (checkpoint.tensor(f"{EXPERT}.weight_{part}") for part in ("packed", "scale"))
        whole = Int4Matrix(packed, scale, 32, 32).dequantised()
        matrix = stored(checkpoint, config, EXPERT, 64, 32)
        assert torch.equal(matrix.dequantised(), whole)
        assert torch.equal(matrix.cut_rows(slice(10, 37)).dequantised(), whole[10:37])
        name = "model.layers.0.mlp.gate_proj"
        whole = checkpoint.tensor(f"{name}.weight").float()
        dense = stored(checkpoint, config, name, 128, 64)
        assert torch.equal(dense.cut_cols(slice(6, 19)).dequantised(), whole[:, 6:19])
        seen = torch.zeros(128, 64)
        threads = set()

        def sink(first: int, rows: torch.Tensor) -> bool:
            threads.add(threading.get_ident())
            assert first % 4 == 0
            seen[first : first + len(rows)] += rows.float()
            return True

        dense.values.stream(sink, 4)
        checkpoint.finish()
        assert torch.equal(seen, whole) and threading.get_ident() not in threads


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("stored_dtype", [torch.float16, torch.bfloat16])
def test_threads_convert_to_another_dtype(tmp_path: Path, stored_dtype: torch.dtype) -> None:
    weight = torch.randn(200, 48).to(stored_dtype)
    save_file({"w.weight": weight}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        matrix = checkpoint.matrix("w", 200, 48, None, lambda _: torch.float32)
        assert isinstance(matrix, StoredMatrix) and matrix.values.dtype == torch.float32
        seen = torch.zeros(200, 48)

        def sink(first: int, rows: torch.Tensor) -> bool:
            seen[first : first + len(rows)] += rows
            return True

        matrix.values.stream(sink, 16)
        checkpoint.finish()
        assert torch.equal(seen, weight.float())
        assert torch.equal(matrix.cut_cols(slice(5, 30)).dequantised(), weight[:, 5:30].float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.o_proj", "model.embed_tokens", "lm_head"])
@pytest.mark.usefixtures("small_pieces")
def test_a_value_that_is_not_finite_is_counted_and_located(tmp_path: Path, name: str, dtype: str) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint(config=TINY_CONFIG, dtype=dtype))  # type: ignore[arg-type]
    with Checkpoint(tmp_path) as checkpoint:
        header = checkpoint.header(f"{name}.weight")
    bad = torch.tensor([float("nan")], dtype=getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    row_bytes = header.shape[1] * len(bad)
    with (tmp_path / header.shard).open("r+b") as file:
        file.seek(header.offset + 33 * row_bytes + 5 * len(bad))
        file.write(bad)
    with pytest.raises(CheckpointError) as refused:
        ModelRunner.load(tmp_path, RunnerOptions(n_pages=1))
    assert refused.value.tensor == f"{name}.weight"
    assert "1 of" in refused.value.reason and "[33, 5]" in refused.value.reason
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load")]


def test_a_shard_that_shrinks_is_refused_by_name(tmp_path: Path) -> None:
    config = write(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        matrix = stored(checkpoint, config, "model.layers.0.mlp.gate_proj", 128, 64)
        header = checkpoint.header("model.layers.0.mlp.gate_proj.weight")
        os.truncate(tmp_path / header.shard, header.offset + 100)
        with pytest.raises(CheckpointError, match=r"gate_proj\.weight: cannot be read .* ends too early"):
            matrix.values.read()


def test_a_cut_of_rows_reads_only_its_bytes(tmp_path: Path) -> None:
    config, progress = write(tmp_path), LoadProgress()
    with Checkpoint(tmp_path, progress) as checkpoint:
        stored(checkpoint, config, "model.layers.0.mlp.gate_proj", 128, 64).cut_rows(slice(96, 128)).read()
    assert progress.done_bytes == 32 * 64 * 2


def test_reads_at_any_offset_give_the_bytes_of_the_file(tmp_path: Path) -> None:
    content = np.random.default_rng(3).integers(0, 256, 20_000, np.uint8)
    (tmp_path / "a").write_bytes(content.tobytes())
    reader = ShardReader(tmp_path)
    for offset, n_bytes in ((0, 1), (1, 4095), (4095, 2), (4096, 8192), (19_999, 1), (3, 19_990)):
        assert np.array_equal(reader.read("a", offset, n_bytes), content[offset : offset + n_bytes])
    with pytest.raises(OSError, match="ends too early"):
        reader.read("a", 19_990, 11)
    reader.close()


def test_the_first_failed_job_is_raised_and_later_ones_do_not_run(tmp_path: Path) -> None:
    reader, ran = ShardReader(tmp_path), []
    failed = threading.Event()

    def fail() -> None:
        try:
            raise ValueError("first")
        finally:
            failed.set()

    reader.submit(fail)
    assert failed.wait(60)
    with pytest.raises(ValueError, match="first"):
        reader.finish()
    reader.submit(lambda: ran.append(1))
    reader.finish()
    reader.close()
    assert not ran

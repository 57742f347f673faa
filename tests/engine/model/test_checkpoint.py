"""Checkpoint files: how tensors are found, INT4 packing, and errors that name the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from libs.engine.model.checkpoint import Checkpoint, weights_digest
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.model.shards import INDEX_NAME, CheckpointError
from libs.engine.model_spec.matrix import unpack_int4
from libs.engine.model_spec.quantization import Int4Groups
from libs.engine.model_spec.stored_matrix import StoredMatrix
from tests.support.quantize import pack_int4
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

OPTIONS = RunnerOptions(n_pages=2, kernels="torch")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path, RandomCheckpoint(config=TINY_CONFIG | {"num_hidden_layers": 2}))
    return tmp_path


def edit_checkpoint(model_dir: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace one tensor of the checkpoint, or remove it."""
    index = json.loads((model_dir / INDEX_NAME).read_text())
    shard = model_dir / index["weight_map"].get(name, "model-00001-of-00002.safetensors")
    tensors = load_file(shard)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
        index["weight_map"][name] = shard.name
    else:
        del index["weight_map"][name]
    save_file(tensors, shard)
    (model_dir / INDEX_NAME).write_text(json.dumps(index))


MOE = "model.layers.1.mlp"


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("model.embed_tokens.weight", None, "not in the checkpoint"),
        ("model.norm.weight", None, "not in the checkpoint"),
        ("lm_head.weight", None, "not tied"),
        ("model.layers.0.self_attn.q_a_layernorm.weight", None, "not in the checkpoint"),
        (f"{MOE}.gate.e_score_correction_bias", None, "not in the checkpoint"),
        (f"{MOE}.experts.7.up_proj.weight_scale", None, "not in the checkpoint"),
        ("model.norm.weight", torch.ones(63), r"expected shape \[64\], got \[63\]"),
        ("model.layers.0.self_attn.o_proj.weight", torch.ones(64, 65), r"expected shape \[64, 64\]"),
        ("model.layers.0.self_attn.o_proj.weight", torch.ones(64, 64).int(), "expected dtype F32"),
        (f"{MOE}.experts.3.down_proj.weight_packed", torch.ones(64, 4).long(), "expected dtype I32"),
        (f"{MOE}.experts.3.down_proj.weight_packed", torch.ones(64, 3).int(), "expected shape"),
        (f"{MOE}.experts.3.down_proj.weight_shape", torch.tensor([32, 64]).int(), "expected"),
    ],
)
def test_missing_and_misshaped_tensors_are_named(
    model_dir: Path, name: str, tensor: torch.Tensor | None, reason: str
) -> None:
    edit_checkpoint(model_dir, name, tensor)
    with pytest.raises(CheckpointError, match=reason) as caught:
        ModelRunner.load(model_dir, OPTIONS)
    assert caught.value.tensor == name
    assert name in caught.value.message


def test_an_expert_without_packed_weight_is_dense(model_dir: Path) -> None:
    name = f"{MOE}.experts.0.gate_proj"
    with Checkpoint(model_dir) as checkpoint:
        packed = checkpoint.matrix(name, 32, 64, Int4Groups(32))
        whole = packed.dequantised()
    assert isinstance(packed, StoredMatrix) and packed.scale is not None
    for part in ("packed", "scale", "shape"):
        edit_checkpoint(model_dir, f"{name}.weight_{part}", None)
    edit_checkpoint(model_dir, f"{name}.weight", whole)
    with Checkpoint(model_dir) as checkpoint:
        dense = checkpoint.matrix(name, 32, 64, Int4Groups(32))
        assert isinstance(dense, StoredMatrix) and dense.scale is None
        torch.testing.assert_close(dense.dequantised(), whole)
    ModelRunner.load(model_dir, OPTIONS)


def test_multi_token_prediction_layers_are_ignored(model_dir: Path) -> None:
    edit_checkpoint(model_dir, "model.layers.2.eh_proj.weight", torch.ones(64, 128))
    with pytest.raises(CheckpointError, match="beyond num_hidden_layers 2 and num_nextn_predict_layers 0"):
        ModelRunner.load(model_dir, OPTIONS)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    ModelRunner.load(model_dir, OPTIONS)


def test_a_single_file_without_index_is_read(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint(n_shards=1))
    with Checkpoint(tmp_path) as indexed:
        expected = {name: indexed.tensor(name) for name in indexed.names()}
    (tmp_path / "model-00001-of-00001.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / INDEX_NAME).unlink()
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == expected.keys() != set()
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.tensor(name), tensor), name
    ModelRunner.load(tmp_path, OPTIONS)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        '{"weight_map": []}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": 1}}',
    ],
)
def test_a_malformed_index_is_refused(model_dir: Path, index: str) -> None:
    (model_dir / INDEX_NAME).write_text(index)
    with pytest.raises(CheckpointError, match="index"):
        ModelRunner.load(model_dir, OPTIONS)


def test_a_truncated_or_missing_shard_is_named(model_dir: Path) -> None:
    shard = model_dir / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: cannot be read"):
        ModelRunner.load(model_dir, OPTIONS)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: cannot be read"):
        ModelRunner.load(model_dir, OPTIONS)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither it nor model\.safetensors"):
        Checkpoint(tmp_path)


def test_the_digest_depends_on_the_weights(tmp_path: Path) -> None:
    first, same, other = (tmp_path / name for name in ("first", "same", "other"))
    write_random_checkpoint(first)
    write_random_checkpoint(same)
    write_random_checkpoint(other, RandomCheckpoint(seed=1))
    assert weights_digest(first) == weights_digest(same) != weights_digest(other)


@given(st.integers(1, 5), st.integers(1, 41), st.integers(0, 2**32 - 1))
def test_packing_round_trips_every_value(rows: int, cols: int, seed: int) -> None:
    values = torch.randint(-8, 8, (rows, cols), generator=torch.Generator().manual_seed(seed))
    nibbles = torch.nn.functional.pad(values + 8, (0, -cols % 8)).view(rows, -1, 8)
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    packed = torch.where(words >= 2**31, words - 2**32, words).int()
    assert torch.equal(unpack_int4(packed, cols), values.to(torch.int8))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_quantization_is_within_one_step(rows: int, groups: int, seed: int) -> None:
    weight = torch.randn(rows, groups * 32, generator=torch.Generator().manual_seed(seed))
    packed = pack_int4(weight, 32, torch.float32)
    step = packed.scale.repeat_interleave(32, 1)
    assert ((packed.dequantised() - weight).abs() <= step * 0.5001).all()

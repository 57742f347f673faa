"""A checkpoint's tensors against its configuration: missing, unexpected, doubled, not finite, too large."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from libs.engine.eagle.head import EagleHead
from libs.engine.kernels.torch_kernels import TorchKernels
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.inventory import check_inventory
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.model.shards import INDEX_NAME, CheckpointError
from libs.engine.model_spec.config import load_config
from slipstream.errors import FailedPrecondition
from tests.engine.model.test_checkpoint import edit_checkpoint
from tests.engine.random_head import RandomHead, write_random_head
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

OPTIONS = RunnerOptions(n_pages=2, kernels="torch")
CONFIG = TINY_CONFIG | {"num_hidden_layers": 2}
EXPERT = "model.layers.1.mlp.experts.3.down_proj"
ATTENTION = "model.layers.0.self_attn"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path, RandomCheckpoint(config=CONFIG))
    return tmp_path


def refused(model_dir: Path, reason: str) -> str:
    """The tensor that a refused checkpoint's error names."""
    with pytest.raises(CheckpointError, match=reason) as caught:
        ModelRunner.load(model_dir, OPTIONS)
    assert caught.value.tensor in caught.value.message
    return caught.value.tensor


def edit_config(model_dir: Path, change: dict[str, Any]) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"{EXPERT}.weight_zero_point", "zero points"),
        (f"{EXPERT}.weight_g_idx", "activation order"),
        (f"{EXPERT}.qweight", "GPTQ and AWQ"),
        (f"{EXPERT}.g_idx", "GPTQ's activation order"),
        (f"{EXPERT}.weight", "config.json implies no such tensor"),  # beside the packed one
        (f"{EXPERT}.weight_global_scale", "NVFP4"),
        (f"{ATTENTION}.o_proj.bias", "a bias is not supported"),
        (f"{ATTENTION}.q_proj.weight", "config.json implies no such tensor"),  # beside q_a_proj
        (f"{ATTENTION}.k_norm.weight", "config.json implies no such tensor"),
        ("model.layers.1.mlp.experts.8.up_proj.weight", "config.json implies no such tensor"),
        ("model.layers.2.input_layernorm.weight", "beyond num_hidden_layers 2"),
        ("language_model.lm_head.bias", "a bias is not supported"),
    ],
)
def test_an_unexpected_tensor_is_refused_by_name(model_dir: Path, name: str, reason: str) -> None:
    edit_checkpoint(model_dir, name, torch.ones(4))
    assert refused(model_dir, reason) == name


@pytest.mark.parametrize("name", ["vision_tower.a.bias", f"{ATTENTION}.rotary_emb.inv_freq"])
def test_tensors_that_no_answer_depends_on_are_ignored(model_dir: Path, name: str) -> None:
    edit_checkpoint(model_dir, name, torch.ones(4))
    ModelRunner.load(model_dir, OPTIONS)


@pytest.mark.parametrize(
    ("change", "tensor", "reason"),
    [
        ({"hidden_size": 128}, "model.embed_tokens.weight", r"expected shape \[256, 128\]"),
        ({"vocab_size": 2**31 - 1}, "model.embed_tokens.weight", "expected shape"),
        ({"num_hidden_layers": 2**31 - 1}, "model.layers.2.input_layernorm.weight", "not in"),
        ({"n_routed_experts": 2**31 - 1}, "model.layers.1.mlp.gate.e_score_correction_bias", "shape"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight", "beyond num_hidden_layers"),
        ({"n_shared_experts": 0}, "model.layers.1.mlp.shared_experts.down_proj.weight", "implies no"),
        ({"q_lora_rank": None}, f"{ATTENTION}.q_proj.weight", "not in the checkpoint"),
        ({"quantization_config": None}, None, "quantization_config states no INT4 groups"),
    ],
)
def test_a_config_of_another_shape_is_refused_before_tensors_are_read(
    model_dir: Path,
    change: dict[str, Any],
    tensor: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Checkpoint, "tensor")
    edit_config(model_dir, change)
    assert refused(model_dir, reason) == tensor or tensor is None


def test_the_bytes_of_the_weights_are_those_of_the_tensors(model_dir: Path) -> None:
    stored = {name: t for path in model_dir.glob("*.safetensors") for name, t in load_file(path).items()}
    counted = sum(t.nbytes for name, t in stored.items() if not name.endswith("weight_shape"))
    with Checkpoint(model_dir) as checkpoint:
        assert check_inventory(checkpoint, load_config(model_dir)) == counted


def test_more_weights_and_cache_than_memory_are_refused_first(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Checkpoint, "tensor")
    for options in (RunnerOptions(n_pages=2, memory_bytes=10_000), RunnerOptions(n_pages=10**12)):
        with pytest.raises(FailedPrecondition, match=r"do not fit in .* GB are missing"):
            ModelRunner.load(model_dir, options)


def test_decode_steps_as_graphs_count_beside_weights_and_cache(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stated cache that leaves them no room is refused before any tensor is read."""
    monkeypatch.delattr(Checkpoint, "tensor")
    options = RunnerOptions(n_pages=2, memory_bytes=10**9, step_bytes=10**9)
    with pytest.raises(FailedPrecondition, match=r"decode steps of 1.000 GB and a KV cache .* are missing"):
        ModelRunner.load(model_dir, options)


FLOAT_TENSORS = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    f"{ATTENTION}.kv_b_proj.weight",
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.mlp.gate.e_score_correction_bias",
    f"{EXPERT}.weight_scale",
)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FLOAT_TENSORS),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 10**9),
)
def test_a_value_that_is_not_finite_is_found_wherever_it_is(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: float, dtype: torch.dtype, at: int
) -> None:
    model_dir = tmp_path_factory.mktemp("model")
    write_random_checkpoint(model_dir, RandomCheckpoint(config=CONFIG))
    with Checkpoint(model_dir) as checkpoint:
        tensor = checkpoint.tensor(name).to(dtype).contiguous()
    index = at % tensor.numel()
    tensor.view(-1)[index] = value
    edit_checkpoint(model_dir, name, tensor)
    place = [int(i) for i in np.unravel_index(index, tensor.shape)]
    reason = f"1 of {tensor.numel()} values are NaN or infinite, the first at {place}"
    assert refused(model_dir, reason.replace("[", r"\[").replace("]", r"\]")) == name


def test_scales_that_make_weights_infinite_are_refused(model_dir: Path) -> None:
    scale = torch.full((64, 1), 1e38)
    edit_checkpoint(model_dir, f"{EXPERT}.weight_scale", scale)
    assert refused(model_dir, "makes weights infinite") == f"{EXPERT}.weight_scale"


def test_a_tied_head_may_be_stored_only_as_the_embedding(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint(config=CONFIG | {"tie_word_embeddings": True}))
    with Checkpoint(tmp_path) as checkpoint:
        embedding = checkpoint.tensor("model.embed_tokens.weight")
    edit_checkpoint(tmp_path, "lm_head.weight", embedding)
    ModelRunner.load(tmp_path, OPTIONS)
    edit_checkpoint(tmp_path, "lm_head.weight", embedding + 1)
    assert refused(tmp_path, "tie_word_embeddings") == "lm_head.weight"


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\0.safetensors", "x.bin", 3],
)
def test_an_index_names_shards_of_its_directory_only(model_dir: Path, shard: object) -> None:
    index = json.loads((model_dir / INDEX_NAME).read_text())
    index["weight_map"]["model.norm.weight"] = shard
    (model_dir / INDEX_NAME).write_text(json.dumps(index))
    assert refused(model_dir, "plain file name|not named") == INDEX_NAME


def test_a_pipe_in_place_of_a_shard_is_refused(model_dir: Path) -> None:
    shard = model_dir / "model-00001-of-00002.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    assert refused(model_dir, "cannot be read: no file") == shard.name


def test_an_index_with_a_repeated_name_is_refused(model_dir: Path) -> None:
    text = (model_dir / INDEX_NAME).read_text()
    (model_dir / INDEX_NAME).write_text(text.replace('"weight_map": {', '"weight_map": {"a": "b", "a": "c",'))
    assert refused(model_dir, "stated twice") == INDEX_NAME


def move(model_dir: Path, name: str, *, keep: bool) -> None:
    """Put a tensor into the other shard, and leave it in the first one if `keep`; the index stays."""
    shards = sorted(model_dir.glob("*.safetensors"))
    tensors = [load_file(shard) for shard in shards]
    source = next(i for i, part in enumerate(tensors) if name in part)
    tensors[1 - source][name] = tensors[source][name]
    if not keep:
        del tensors[source][name]
    for shard, part in zip(shards, tensors, strict=True):
        save_file(part, shard)


def test_a_tensor_in_two_shards_is_refused(model_dir: Path) -> None:
    move(model_dir, "model.norm.weight", keep=True)
    assert refused(model_dir, "stored twice, in model-00001.* and in model-00002") == "model.norm.weight"


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(model_dir: Path) -> None:
    move(model_dir, "model.norm.weight", keep=False)
    assert refused(model_dir, "which does not hold it") == "model.norm.weight"


def test_a_tensor_that_the_index_does_not_name_is_refused(model_dir: Path) -> None:
    shard = model_dir / "model-00001-of-00002.safetensors"
    save_file(load_file(shard) | {"extra.weight": torch.ones(1)}, shard)
    assert refused(model_dir, "does not name it") == "extra.weight"


def header(raw: bytes, length: int | None = None) -> bytes:
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw


BAD_FILES = {
    "empty": b"",
    "short": b"\x01\x00",
    "huge header": header(b"{}", 2**60),
    "not json": header(b"{"),
    "not an object": header(b"[]"),
    "offsets beyond the file": header(
        b'{"model.norm.weight":{"dtype":"F32","shape":[64],"data_offsets":[0,256]}}'
    ),
    "shape larger than its bytes": header(
        b'{"model.norm.weight":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}'
    )
    + b"\0" * 4,
    "overlap": header(
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}'
    )
    + b"\0" * 6,
    "unknown dtype": header(b'{"a":{"dtype":"X9","shape":[1],"data_offsets":[0,1]}}') + b"\0",
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_malformed_files_are_refused_by_name(model_dir: Path, kind: str) -> None:
    shard = model_dir / "model-00002-of-00002.safetensors"
    shard.write_bytes(BAD_FILES[kind])
    assert refused(model_dir, "cannot be read") == shard.name


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("midlayer.self_attn.q_proj.bias", torch.ones(4), "unexpected"),
        ("midlayer.mlp.down_proj.weight", torch.full((64, 96), math.inf), "NaN or infinite"),
    ],
)
def test_tensors_of_a_draft_head_are_checked(
    model_dir: Path, tmp_path: Path, name: str, tensor: torch.Tensor, reason: str
) -> None:
    head_dir = tmp_path / "head"
    tensors = write_random_head(head_dir, RandomHead())
    EagleHead.load(head_dir, model_dir, TorchKernels())
    save_file(tensors | {name: tensor}, head_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=reason) as caught:
        EagleHead.load(head_dir, model_dir, TorchKernels())
    assert caught.value.tensor == name

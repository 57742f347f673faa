"""Heads in the layout of nvidia/Kimi-K2.5-Thinking-Eagle3 draft as a plain reference does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from libs.engine.core.build import EngineOptions, build_engine
from libs.engine.eagle.drafter import DrafterEngine
from libs.engine.eagle.head import EagleHead
from libs.engine.kernels.library import load_library
from libs.engine.kernels.native import NativeKernels
from libs.engine.kernels.torch_kernels import TorchKernels
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.feature_head import load_feature_head
from libs.engine.model.shards import CheckpointError
from libs.engine.model_spec.config import load_config
from slipstream.errors import InvalidArgument
from tests.engine.eagle.plain_head import norm
from tests.engine.eagle.plain_latent_head import plain_latent_drafts
from tests.engine.random_latent_head import RandomLatentHead, write_random_latent_head
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

RNG = np.random.default_rng(0)
KERNELS = NativeKernels(load_library(), 1)
SPECS = {
    "published": RandomLatentHead(),
    "without yarn": RandomLatentHead(yarn=False),
    "without a latent of queries": RandomLatentHead(q_lora_rank=None),
    "norm_output": RandomLatentHead(flags=("norm_output",)),
    "norm_before_residual": RandomLatentHead(flags=("norm_before_residual",)),
    "EAGLE-3.1": RandomLatentHead(flags=("fc_norm", "norm_output")),
}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_random_checkpoint(path, RandomCheckpoint(dtype="float32"))
    return path


def embedding_of(target_dir: Path) -> torch.Tensor:
    with Checkpoint(target_dir) as target:
        return target.tensor("model.embed_tokens.weight")


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("kernels", [KERNELS, TorchKernels()], ids=["native", "torch"])
def test_drafts_equal_plain_recomputation(
    tmp_path: Path, target_dir: Path, spec: RandomLatentHead, kernels: NativeKernels | TorchKernels
) -> None:
    tensors = write_random_latent_head(tmp_path, spec)
    drafter = DrafterEngine(EagleHead.load(tmp_path, target_dir, kernels))
    embedding, expected = embedding_of(target_dir), {}
    for i, (n, start) in enumerate([(1, 0), (9, 0), (5, 140)]):
        tokens = RNG.integers(0, 256, n).astype(np.uint32)
        features = RNG.normal(size=(n, 64)).astype(np.float32)
        drafter.extend(f"s{i}", start, tokens[: n - 1], features[: n - 1]) if n > 1 else None
        drafter.extend(f"s{i}", start + n - 1, tokens[n - 1 :], features[n - 1 :])
        expected[f"s{i}"] = plain_latent_drafts(
            spec, tensors, embedding, torch.from_numpy(features), tokens.tolist(), start, 4
        )
    assert drafter.propose_batch(list(expected), 4) == expected


@pytest.mark.parametrize("flags", [(), ("fc_norm",), ("norm_before_fc",)], ids=["plain", "3.1", "one norm"])
def test_the_target_norms_features_as_the_head_says(
    tmp_path: Path, target_dir: Path, flags: tuple[str, ...]
) -> None:
    spec = RandomLatentHead(flags=flags)
    tensors = write_random_latent_head(tmp_path, spec)
    head = load_feature_head(tmp_path, load_config(target_dir), KERNELS)
    outputs = {layer: torch.from_numpy(RNG.normal(size=(3, 64)).astype(np.float32)) for layer in (0, 1)}
    w = {name: value.double() for name, value in tensors.items()}
    for row, found in enumerate(head.fuse(outputs, KERNELS)):
        slots = [outputs[layer][row].double() for layer in (0, 1, 1)]
        if "fc_norm" in flags:
            slots = [norm(slot, w[f"fc_norm.{i}.weight"]) for i, slot in enumerate(slots)]
        joined = torch.cat(slots)
        if "norm_before_fc" in flags:
            joined = norm(joined, w["input_norm.weight"])
        torch.testing.assert_close(found.double(), w["fc.weight"] @ joined, atol=1e-4, rtol=1e-4)


def test_an_engine_computes_features_for_such_a_head(tmp_path: Path, target_dir: Path) -> None:
    write_random_latent_head(tmp_path, RandomLatentHead(flags=("fc_norm",)))
    engine = build_engine(target_dir, EngineOptions(n_pages=4, draft_model_dir=tmp_path, threads=1))
    assert engine.info.feature_width == 64


def test_a_missing_norm_is_named(tmp_path: Path, target_dir: Path) -> None:
    tensors = write_random_latent_head(tmp_path, RandomLatentHead(flags=("fc_norm",)))
    del tensors["fc_norm.1.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    for load in (
        lambda: EagleHead.load(tmp_path, target_dir, KERNELS),
        lambda: load_feature_head(tmp_path, load_config(target_dir), KERNELS),
    ):
        with pytest.raises(CheckpointError, match=r"fc_norm\.1"):
            load()


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("rope_scaling", {"type": "linear", "factor": 4}, "rope_scaling.type"),
        ("kv_lora_rank", None, "kv_lora_rank"),
        ("num_hidden_layers", 2, "num_hidden_layers"),
        ("eagle_config", {"fc_norm": True, "norm_before_fc": True}, "norm_before_fc"),
        ("model_type", "llama", "model_type"),
    ],
)
def test_unsupported_variants_are_refused(
    tmp_path: Path, target_dir: Path, key: str, value: object, field: str
) -> None:
    spec = RandomLatentHead()
    write_random_latent_head(tmp_path, spec)
    (tmp_path / "config.json").write_text(json.dumps(spec.config | {key: value}), encoding="utf-8")
    with pytest.raises(InvalidArgument) as caught:
        EagleHead.load(tmp_path, target_dir, KERNELS)
    assert caught.value.field == field

"""A block drafter behind the interface of draft heads equals a plain reference on random weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from libs.engine.core.build import EngineOptions, build_drafter, build_engine
from libs.engine.kernels.library import load_library
from libs.engine.kernels.native import NativeKernels
from libs.engine.model.checkpoint import Checkpoint
from slipstream.errors import InvalidArgument
from tests.engine.eagle.plain_block_head import RandomBlockHead, plain_block_drafts, write_random_block_head
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

RNG = np.random.default_rng(0)
KERNELS = NativeKernels(load_library(), 1)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_random_checkpoint(path, RandomCheckpoint(dtype="float32"))
    return path


@pytest.mark.parametrize("n_kv_heads", [2, 4])
def test_drafts_equal_plain_recomputation(tmp_path: Path, target_dir: Path, n_kv_heads: int) -> None:
    spec = RandomBlockHead(n_kv_heads=n_kv_heads)
    tensors = write_random_block_head(tmp_path, spec)
    drafter = build_drafter(tmp_path, target_dir, kernels=KERNELS)
    with Checkpoint(target_dir) as target:
        shared = target.tensor("model.embed_tokens.weight"), target.tensor("lm_head.weight")
    expected = {}
    for i, (n, start) in enumerate([(1, 0), (9, 0), (5, 40)]):
        tokens = RNG.integers(0, 256, n).astype(np.uint32)
        features = RNG.normal(size=(n, 64)).astype(np.float32)
        drafter.extend(f"s{i}", start, tokens, features)
        expected[f"s{i}"] = plain_block_drafts(
            spec, tensors, shared, torch.from_numpy(features), int(tokens[-1]), start, 4
        )
    assert drafter.propose_batch(list(expected), 4) == expected
    longest = drafter.propose_batch(list(expected), 16)
    assert {len(drafts) for drafts in longest.values()} == {spec.block_size - 1}
    sure = drafter.propose_batch(list(expected), 4, min_confidence=1.1)
    assert sure == {name: [] for name in expected}


def test_an_engine_fuses_the_layers_that_the_drafter_states(tmp_path: Path, target_dir: Path) -> None:
    write_random_block_head(tmp_path, RandomBlockHead(target_layers=(0,)))
    engine = build_engine(target_dir, EngineOptions(n_pages=4, draft_model_dir=tmp_path, threads=1))
    assert engine.info.feature_width == 64


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("layer_types", ["full_attention", "sliding_attention"], "layer_types"),
        ("dflash_config", {"mask_token_id": 256, "target_layer_ids": [0]}, "dflash_config.mask_token_id"),
        ("dflash_config", {"mask_token_id": 1, "target_layer_ids": []}, "dflash_config.target_layer_ids"),
        ("block_size", 1, "block_size"),
        ("use_sliding_window", True, "use_sliding_window"),
    ],
)
def test_unsupported_variants_are_refused(
    tmp_path: Path, target_dir: Path, key: str, value: object, field: str
) -> None:
    spec = RandomBlockHead()
    write_random_block_head(tmp_path, spec)
    (tmp_path / "config.json").write_text(json.dumps(spec.config | {key: value}), encoding="utf-8")
    with pytest.raises(InvalidArgument) as caught:
        build_drafter(tmp_path, target_dir, kernels=KERNELS)
    assert caught.value.field == field

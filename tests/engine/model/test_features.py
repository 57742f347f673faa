"""EAGLE-3 features: fused residual-stream states, computed by the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bench.engine.transformers_peer import load_transformers
from libs.engine.model.feature_head import default_feature_layers
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.model.shards import CheckpointError
from libs.engine.step.batch import ForwardBatch
from slipstream.errors import InvalidArgument
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

HIDDEN = TINY_CONFIG["hidden_size"]
N_LAYERS = 6
N_TOKENS = 20


def batch(*, want_features: bool) -> ForwardBatch:
    ids = np.random.default_rng(0).integers(0, TINY_CONFIG["vocab_size"], N_TOKENS).astype(np.int32)
    return ForwardBatch(
        token_ids=ids,
        positions=np.arange(N_TOKENS, dtype=np.int32),
        query_start=np.array([0, N_TOKENS], np.int32),
        context_len=np.array([N_TOKENS], np.int32),
        page_table=np.array([[1]], np.int32),
        logit_rows=np.array([N_TOKENS - 1], np.int32),
        want_features=want_features,
    )


def write_head(head_dir: Path, config: dict[str, Any], width: int = 3 * HIDDEN) -> torch.Tensor:
    fc = torch.randn(HIDDEN, width, generator=torch.Generator().manual_seed(1)).div(width**0.5)
    head_dir.mkdir()
    save_file({"fc.weight": fc}, head_dir / "model.safetensors")
    (head_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return fc


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_random_checkpoint(path, RandomCheckpoint(config=TINY_CONFIG | {"num_hidden_layers": N_LAYERS}))
    return path


def load(model_dir: Path, head_dir: Path | None, kernels: Any = "torch") -> ModelRunner:
    options = RunnerOptions(
        n_pages=2, kv_dtype="float32", kernels=kernels, compute_dtype="float32", head_dir=head_dir
    )
    return ModelRunner.load(model_dir, options)


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (1, 2, 2)),  # outputs of 1, n//2 - 1 and n - 4 for n = 6
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}}, (0, 3, 5)),
    ],
)
def test_features_fuse_the_residual_stream(
    model_dir: Path, tmp_path: Path, config: dict[str, Any], layers: tuple[int, ...], kernels: str
) -> None:
    fc = write_head(tmp_path / "head", config)
    runner = load(model_dir, tmp_path / "head", kernels)
    assert runner.feature_width == HIDDEN
    output = runner.forward(batch(want_features=True))
    reference = load_transformers(model_dir, torch.float32)
    states: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(reference.model.layers):
        layer.register_forward_hook(lambda _m, _i, out, index=index: states.update({index: out}))
    with torch.inference_mode():
        reference(torch.from_numpy(batch(want_features=True).token_ids)[None].long())
    fused = torch.cat([states[layer].reshape(N_TOKENS, HIDDEN) for layer in layers], dim=-1)
    assert output.features is not None
    torch.testing.assert_close(output.features, fused @ fc.T, rtol=0, atol=1e-4)
    assert output.logits.shape == (1, TINY_CONFIG["vocab_size"])


def test_features_are_computed_only_on_request_and_with_a_head(model_dir: Path, tmp_path: Path) -> None:
    write_head(tmp_path / "head", {})
    assert load(model_dir, tmp_path / "head").forward(batch(want_features=False)).features is None
    headless = load(model_dir, None)
    assert headless.feature_width == 0
    assert headless.forward(batch(want_features=True)).features is None


def test_default_feature_layers() -> None:
    assert default_feature_layers(61) == (1, 29, 57)
    for n_layers in range(1, 12):
        assert all(0 <= layer < n_layers for layer in default_feature_layers(n_layers))


def test_heads_for_another_target_are_refused(model_dir: Path, tmp_path: Path) -> None:
    write_head(tmp_path / "narrow", {}, width=HIDDEN)
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        load(model_dir, tmp_path / "narrow")
    write_head(tmp_path / "deep", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, N_LAYERS]}})
    with pytest.raises(InvalidArgument, match="eagle_aux_hidden_state_layer_ids"):
        load(model_dir, tmp_path / "deep")

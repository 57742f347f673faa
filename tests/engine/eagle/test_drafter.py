"""The drafter equals recomputation from scratch for any batch, order of rows and window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from libs.engine.eagle.drafter import DrafterEngine
from libs.engine.eagle.head import EagleHead
from libs.engine.kernels.library import load_library
from libs.engine.kernels.native import NativeKernels
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.shards import CheckpointError
from libs.engine.step.draft_head import ContextRows
from slipstream.errors import InvalidArgument
from tests.engine.eagle.plain_head import plain_drafts
from tests.engine.random_head import RandomHead, write_random_head
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

KERNELS = NativeKernels(load_library(), 1)
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_random_checkpoint(path, RandomCheckpoint(dtype="float32", prefix="language_model."))
    return path


def rows(n: int) -> tuple[np.ndarray, np.ndarray]:
    return RNG.integers(0, 256, n).astype(np.uint32), RNG.normal(size=(n, 64)).astype(np.float32)


SPECS = {
    "plain": RandomHead(),
    "own draft vocabulary": RandomHead(draft_vocab_size=100),
    "layers.0 under model.": RandomHead(layer="layers.0", prefix="model.", draft_vocab_size=64),
    "full attention": RandomHead(n_kv_heads=4),
    "norm_before_residual": RandomHead(extra=(("norm_before_residual", True),)),
    "norm_output": RandomHead(extra=(("norm_output", True),)),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_drafts_equal_plain_recomputation(tmp_path: Path, target_dir: Path, spec: RandomHead) -> None:
    tensors = write_random_head(tmp_path, spec)
    drafter = DrafterEngine(EagleHead.load(tmp_path, target_dir, KERNELS))
    expected = {}
    for i, (n, start) in enumerate([(1, 0), (9, 0), (5, 40)]):
        tokens, features = rows(n)
        drafter.extend(f"s{i}", start, tokens, features)
        expected[f"s{i}"] = plain_drafts(spec, tensors, torch.from_numpy(features), tokens.tolist(), start, 4)
    assert drafter.propose_batch(["s0", "s1", "s2", "unknown"], 4) == expected
    assert drafter.propose_batch(["s1"], 4) == {"s1": expected["s1"]}
    assert [drafter.base_tokens(s) for s in ("s0", "s1", "s2", "unknown")] == [2, 10, 46, 0]


@pytest.fixture
def drafter(tmp_path: Path, target_dir: Path) -> DrafterEngine:
    write_random_head(tmp_path, RandomHead(draft_vocab_size=200))
    return DrafterEngine(EagleHead.load(tmp_path, target_dir, KERNELS), window_tokens=16, max_sequences=3)


def test_rows_may_arrive_in_any_pieces(drafter: DrafterEngine) -> None:
    tokens, features = rows(12)
    drafter.extend("whole", 3, tokens, features)
    for i in range(12):
        drafter.extend("single", 3 + i, tokens[i : i + 1], features[i : i + 1])
    drafter.extend_batch(
        [
            ContextRows("mixed", 3, tokens[:5], features[:5]),
            ContextRows("mixed", 8, tokens[5:], features[5:]),
        ]
    )
    found = drafter.propose_batch(["whole", "single", "mixed"], 5)
    assert found["whole"] == found["single"] == found["mixed"]


def test_proposing_drafts_does_not_change_the_context(drafter: DrafterEngine) -> None:
    tokens, features = rows(8)
    drafter.extend("a", 0, tokens, features)
    drafter.extend("b", 0, tokens[:4], features[:4])
    first = drafter.propose_batch(["b"], 6)
    assert drafter.propose_batch(["b"], 6) == first
    drafter.extend("b", 4, tokens[4:], features[4:])
    found = drafter.propose_batch(["a", "b"], 3)
    assert found["a"] == found["b"]


def test_repeated_rows_are_replaced_and_a_gap_clears_the_context(drafter: DrafterEngine) -> None:
    tokens, features = rows(12)
    wrong_tokens, wrong_features = rows(12)
    drafter.extend("a", 0, tokens, features)
    drafter.extend("b", 0, np.r_[tokens[:6], wrong_tokens[6:]], np.r_[features[:6], wrong_features[6:]])
    drafter.extend("b", 6, tokens[6:], features[6:])
    drafter.extend("c", 50, wrong_tokens, wrong_features)
    drafter.extend("c", 0, tokens, features)
    found = drafter.propose_batch(["a", "b", "c"], 4)
    assert found["a"] == found["b"] == found["c"]


def test_the_window_bounds_attention_and_stored_rows(drafter: DrafterEngine) -> None:
    tokens, features = rows(200)
    for i in range(0, 200, 8):
        drafter.extend("long", i, tokens[i : i + 8], features[i : i + 8])
    drafter.extend("at once", 0, tokens, features)
    drafter.extend("tail", 184, tokens[184:], features[184:])
    found = drafter.propose_batch(["long", "at once", "tail"], 4)
    assert found["long"] == found["at once"] == found["tail"]


def test_contexts_are_bounded_and_dropped_on_close(drafter: DrafterEngine) -> None:
    tokens, features = rows(2)
    for seq_id in "abcd":
        drafter.extend(seq_id, 0, tokens, features)
    assert drafter.sequences == 3
    assert drafter.base_tokens("a") == 0
    drafter.close("d")
    drafter.close("d")
    assert set(drafter.propose_batch(list("abcd"), 1)) == {"b", "c"}


@pytest.mark.parametrize(
    ("start", "tokens", "features", "field"),
    [
        (0, [1], np.zeros((1, 63)), "features"),
        (0, [1, 2], np.zeros((1, 64)), "next_tokens"),
        (-1, [1], np.zeros((1, 64)), "start_position"),
        (0, [256], np.zeros((1, 64)), "next_tokens"),
        (0, [1], np.full((1, 64), np.nan), "features"),
        (0, [], np.zeros((0, 64)), "features"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    drafter: DrafterEngine, start: int, tokens: list[int], features: np.ndarray, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        drafter.extend("a", start, np.array(tokens, dtype=np.uint32), features.astype(np.float32))
    assert caught.value.field == field
    assert drafter.sequences == 0


def test_parts_missing_in_the_head_are_taken_from_the_target(tmp_path: Path, target_dir: Path) -> None:
    spec = RandomHead(own_embedding=False, own_lm_head=False)
    tensors = write_random_head(tmp_path, spec)
    drafter = DrafterEngine(EagleHead.load(tmp_path, target_dir, KERNELS))
    with Checkpoint(target_dir) as target:
        tensors["embed_tokens.weight"] = target.tensor("language_model.model.embed_tokens.weight")
        tensors["lm_head.weight"] = target.tensor("language_model.lm_head.weight")
    tokens, features = rows(5)
    drafter.extend("a", 0, tokens, features)
    expected = plain_drafts(spec, tensors, torch.from_numpy(features), tokens.tolist(), 0, 3)
    assert drafter.propose_batch(["a"], 3) == {"a": expected}


def test_a_draft_vocabulary_needs_its_own_head(tmp_path: Path, target_dir: Path) -> None:
    write_random_head(tmp_path, RandomHead(draft_vocab_size=100, own_lm_head=False))
    with pytest.raises(CheckpointError, match="lm_head"):
        EagleHead.load(tmp_path, target_dir, KERNELS)


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("architectures", ["Eagle2LlamaForCausalLM"], "architectures"),
        ("rope_scaling", {"type": "yarn", "factor": 4}, "rope_scaling.type"),
        ("use_mtp_layernorm", True, "use_mtp_layernorm"),
        ("eagle_config", {"norm_before_fc": "yes"}, "eagle_config.norm_before_fc"),
        ("target_hidden_size", 128, "target_hidden_size"),
        ("num_hidden_layers", 2, "num_hidden_layers"),
        ("hidden_act", "gelu", "hidden_act"),
        ("draft_vocab_size", 512, "draft_vocab_size"),
        ("hidden_size", "64", "hidden_size"),
    ],
)
def test_unsupported_head_variants_are_refused(
    tmp_path: Path, target_dir: Path, key: str, value: object, field: str
) -> None:
    write_random_head(tmp_path, RandomHead(extra=((key, value),)))
    with pytest.raises(InvalidArgument) as caught:
        EagleHead.load(tmp_path, target_dir, KERNELS)
    assert caught.value.field == field

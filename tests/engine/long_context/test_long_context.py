"""Logits at positions up to 262,144 against a plain fp64 model, with the YaRN of Kimi-K2.5."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.step.batch import ForwardBatch
from tests.engine.long_context.plain_model import PlainModel
from tests.engine.model.release_configs import YARN
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

# The rotary part, its base and YaRN are those of K2.5. With this gain few keys get most of a row's attention,
# at any distance, so that a wrong angle changes the logits.
CONFIG = TINY_CONFIG | {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 262_144,
    "rope_scaling": YARN,
}
STEP_TOKENS = 512
N_DECODED = 4
# Bounds of the relative error |found - wanted| / |wanted| of a row's logits: of the worst row in fp32, of the
# median one in bf16, where rounding may choose another expert for a row.
FLOAT32_ERROR = 1e-4
BF16_ERROR = 5e-2


def write_model(path: Path, n_layers: int = 2) -> Path:
    config = CONFIG | {"num_hidden_layers": n_layers}
    write_random_checkpoint(path, RandomCheckpoint(config=config, quantization="none", gain=2.0))
    return path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("long"))


def tokens(n_tokens: int) -> np.ndarray:
    return np.random.default_rng(n_tokens).integers(0, CONFIG["vocab_size"], n_tokens).astype(np.int32)


def wanted_positions(n_tokens: int) -> list[int]:
    """Positions of every magnitude, ends of steps, and those that are decoded one by one."""
    spread = {
        0,
        STEP_TOKENS - 1,
        STEP_TOKENS,
        n_tokens // 7,
        n_tokens // 3,
        n_tokens // 2,
        n_tokens * 9 // 10,
    }
    return sorted(spread | set(range(n_tokens - N_DECODED - 1, n_tokens)))


def engine_logits(model_dir: Path, ids: np.ndarray, positions: list[int], compute: str) -> torch.Tensor:
    """Prefill in steps, then decode the last tokens one by one, on scattered pages."""
    n_pages = -(-len(ids) // 64)
    fp32 = compute == "float32"
    options = RunnerOptions(
        n_pages=n_pages, kv_dtype="float32" if fp32 else "auto", compute_dtype="float32" if fp32 else "auto"
    )
    runner = ModelRunner.load(model_dir, options)
    pages = np.random.default_rng(0).permutation(n_pages).astype(np.int32)[None]
    ends = [
        *range(STEP_TOKENS, len(ids) - N_DECODED, STEP_TOKENS),
        *range(len(ids) - N_DECODED, len(ids) + 1),
    ]
    found, start = [], 0
    for end in ends:
        rows = [position - start for position in positions if start <= position < end]
        batch = ForwardBatch(
            token_ids=ids[start:end],
            positions=np.arange(start, end, dtype=np.int32),
            query_start=np.array([0, end - start], np.int32),
            context_len=np.array([end], np.int32),
            page_table=pages,
            logit_rows=np.array(rows, np.int32),
        )
        found.append(runner.forward(batch).logits)
        start = end
    return torch.cat(found)


def relative_errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    errors: torch.Tensor = (found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return errors


def check(model_dir: Path, n_tokens: int) -> None:
    ids, positions = tokens(n_tokens), wanted_positions(n_tokens)
    wanted = PlainModel(model_dir).logits(ids.tolist(), positions)
    for compute, bound in (("float32", FLOAT32_ERROR), ("auto", BF16_ERROR)):
        found = engine_logits(model_dir, ids, positions, compute)
        errors = relative_errors(found, wanted)
        worst, median = float(errors.max()), float(errors.median())
        difference = float((found.double() - wanted).abs().max())
        print(
            f"{n_tokens} tokens, {compute}: relative {worst:.1e}, median {median:.1e}, "
            f"absolute {difference:.1e}, largest logit {float(wanted.abs().max()):.1f}"
        )
        assert (worst if compute == "float32" else median) < bound, f"{errors.tolist()} at {positions}"


def test_logits_at_8k(model_dir: Path) -> None:
    check(model_dir, 8192)


def test_the_reference_tells_a_wrong_rotation(model_dir: Path) -> None:
    """Without YaRN the logits differ by far more than the bounds."""
    ids, positions = tokens(2048), [1500, 2047]
    right, wrong = (PlainModel(model_dir, yarn=on).logits(ids.tolist(), positions) for on in (True, False))
    assert float(relative_errors(wrong, right).min()) > 2 * BF16_ERROR


@pytest.mark.soak
@pytest.mark.parametrize("n_tokens", [65_536, 262_144])
def test_logits_of_long_contexts(tmp_path: Path, n_tokens: int) -> None:
    """With one layer, of which the reference computes only the wanted rows: 3 minutes of one core."""
    check(write_model(tmp_path, n_layers=1), n_tokens)

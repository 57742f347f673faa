"""Logits against transformers' DeepseekV3ForCausalLM, fp32 and eager, on checkpoints in the real layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.engine.transformers_peer import load_transformers
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.step.batch import ForwardBatch
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

TOLERANCE = 1e-4
VOCAB = TINY_CONFIG["vocab_size"]
BLOCK_TOKENS = 16
N_PAGES = 64

VARIANTS: dict[str, RandomCheckpoint] = {
    "kimi": RandomCheckpoint(),
    "kimi_k25_prefix": RandomCheckpoint(prefix="language_model.", n_shards=3),
    "no_q_lora": RandomCheckpoint(config=TINY_CONFIG | {"q_lora_rank": None}),
    "groups": RandomCheckpoint(config=TINY_CONFIG | {"n_group": 4, "topk_group": 2}),
    "tied_head": RandomCheckpoint(config=TINY_CONFIG | {"tie_word_embeddings": True}),
    "dense_fp32": RandomCheckpoint(dtype="float32", quantization="none", n_shards=1),
    "dense_bf16_two_shared": RandomCheckpoint(
        config=TINY_CONFIG | {"n_shared_experts": 2, "norm_topk_prob": False}, quantization="none"
    ),
    "no_yarn": RandomCheckpoint(
        config={key: value for key, value in TINY_CONFIG.items() if key != "rope_scaling"}
    ),
    "yarn_attention_factor": RandomCheckpoint(
        config=TINY_CONFIG | {"rope_scaling": TINY_CONFIG["rope_scaling"] | {"attention_factor": 0.7}}
    ),
    "yarn_not_truncated": RandomCheckpoint(
        config=TINY_CONFIG | {"rope_scaling": TINY_CONFIG["rope_scaling"] | {"truncate": False}}
    ),
    # Widths that are no multiple of any vector length.
    "odd_widths": RandomCheckpoint(
        config=TINY_CONFIG
        | {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 6,
            "v_head_dim": 10,
            "kv_lora_rank": 20,
            "q_lora_rank": 28,
            "vocab_size": VOCAB - 5,
        }
    ),
}


# Directory, transformers' model, its logits so far.
Checkpoint = tuple[Path, Any, dict[bytes, torch.Tensor]]


@dataclass
class Pair:
    runner: ModelRunner
    reference: Any
    references: dict[bytes, torch.Tensor]  # logits of the reference, shared by both kernels
    vocab_size: int


@pytest.fixture(scope="module", params=list(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    model_dir = tmp_path_factory.mktemp(request.param)
    write_random_checkpoint(model_dir, VARIANTS[request.param])
    return model_dir, load_transformers(model_dir, torch.float32), {}


@pytest.fixture(scope="module", params=["torch", "native"])
def pair(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Pair:
    model_dir, reference, references = checkpoint
    options = RunnerOptions(
        n_pages=N_PAGES,
        block_tokens=BLOCK_TOKENS,
        kv_dtype="float32",
        kernels=request.param,
        compute_dtype="float32",
    )
    runner = ModelRunner.load(model_dir, options)
    assert runner.kernels == request.param
    return Pair(runner, reference, references, runner.config.vocab_size)


def tokens(pair: Pair, n_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, pair.vocab_size, n_tokens).astype(np.int32)


def expected(pair: Pair, ids: np.ndarray) -> torch.Tensor:
    known = pair.references.get(ids.tobytes())
    if known is None:
        with torch.inference_mode():
            known = pair.reference(torch.from_numpy(ids)[None].long()).logits[0]
        pair.references[ids.tobytes()] = known
    return known


def batch_of(parts: Sequence[tuple[np.ndarray, int, Sequence[int]]]) -> ForwardBatch:
    """Build a batch with all logits from (token ids so far, first query position, pages) per sequence."""
    rows = [np.arange(start, len(ids), dtype=np.int32) for ids, start, _ in parts]
    n_rows = [len(r) for r in rows]
    width = max(len(pages) for _, _, pages in parts)
    table = np.zeros((len(parts), width), np.int32)
    for line, (_, _, pages) in zip(table, parts, strict=True):
        line[: len(pages)] = pages
    return ForwardBatch(
        token_ids=np.concatenate([ids[start:] for ids, start, _ in parts]),
        positions=np.concatenate(rows),
        query_start=np.concatenate(([0], np.cumsum(n_rows))).astype(np.int32),
        context_len=np.array([len(ids) for ids, _, _ in parts], np.int32),
        page_table=table,
        logit_rows=np.arange(sum(n_rows), dtype=np.int32),
    )


def pages_for(n_tokens: int, seed: int = 0) -> list[int]:
    """Return scattered pages, neither contiguous nor ascending."""
    scattered: list[int] = np.random.default_rng(seed).permutation(N_PAGES).tolist()
    return scattered[: -(-n_tokens // BLOCK_TOKENS)]


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, wanted, rtol=0, atol=TOLERANCE)


def test_prefill_beyond_the_yarn_ramp(pair: Pair) -> None:
    ids = tokens(pair, 300)  # original_max_position_embeddings is 64
    actual = pair.runner.forward(batch_of([(ids, 0, pages_for(300))])).logits
    close(actual, expected(pair, ids))


@pytest.mark.parametrize("chunks", [(100, 77, 1, 22), (1, 5, 64, 130), (199, 1)])
def test_chunked_prefill_equals_one_shot(pair: Pair, chunks: tuple[int, ...]) -> None:
    ids, pages = tokens(pair, sum(chunks), seed=1), pages_for(sum(chunks), seed=1)
    parts, start = [], 0
    for chunk in chunks:
        parts.append(pair.runner.forward(batch_of([(ids[: start + chunk], start, pages)])).logits)
        start += chunk
    close(torch.cat(parts), expected(pair, ids))


def test_decode_one_token_at_a_time(pair: Pair) -> None:
    ids, pages = tokens(pair, 90, seed=2), pages_for(90, seed=2)
    pair.runner.forward(batch_of([(ids[:60], 0, pages)]))
    steps = [pair.runner.forward(batch_of([(ids[: n + 1], n, pages)])).logits for n in range(60, 90)]
    close(torch.cat(steps), expected(pair, ids)[60:])


def test_mixed_batch_of_prefill_decode_and_verify_rows(pair: Pair) -> None:
    """One forward with a long chunk, a short chunk, a decode row and K+1 verify rows."""
    lengths, starts = (150, 40, 33, 81), (0, 30, 32, 77)
    permutation = np.random.default_rng(3).permutation(N_PAGES).tolist()
    parts = []
    for seed, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        pages = [permutation.pop() for _ in range(-(-length // BLOCK_TOKENS))]
        ids = tokens(pair, length, seed=10 + seed)
        if start:
            pair.runner.forward(batch_of([(ids[:start], 0, pages)]))
        parts.append((ids, start, pages))
    actual = pair.runner.forward(batch_of(parts)).logits
    wanted = torch.cat([expected(pair, ids)[start:] for ids, start, _ in parts])
    close(actual, wanted)


def test_logit_rows_select_and_order(pair: Pair) -> None:
    ids = tokens(pair, 50, seed=4)
    full = batch_of([(ids, 0, pages_for(50))])
    wanted = pair.runner.forward(full).logits
    fields = {name: getattr(full, name) for name in full.__slots__}
    some = ForwardBatch(**fields | {"logit_rows": np.array([49, 0, 7], np.int32)})
    close(pair.runner.forward(some).logits, wanted[[49, 0, 7]])

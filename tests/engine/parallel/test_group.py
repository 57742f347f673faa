"""Groups of 2 and 4 processes against one process: logits, KV pages, features, whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from libs.engine.core.engine import PagedEngine
from libs.engine.core.torch_model import TorchModel
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.parallel.group_runner import GroupRunner
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.step_model import SequenceRows, lay_out
from libs.engine.step.stop_flag import StepAborted, StopFlag
from libs.engine.step.types import SamplingParams
from slipstream.errors import InvalidArgument
from tests.engine.parallel.forked_ranks import forked_group
from tests.engine.random_head import write_random_head
from tests.engine.support import generate, make_spec
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

BLOCK_TOKENS = 16
TOLERANCE = 1e-5
# INT4 experts with latent queries; dense experts in groups, with an odd vocabulary and a tied head.
MODELS = {
    "int4": RandomCheckpoint(dtype="float32"),
    "groups": RandomCheckpoint(
        config=TINY_CONFIG
        | {
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 2,
            "tie_word_embeddings": True,
            "vocab_size": 251,
        },
        quantization="none",
    ),
}
CUTS = ["tp=2", "pp=2", "dp=2", "dp=2,ep=2", "tp=2,pp=2", "tp=2,kv=2", "kv=4"]
LONG_CUTS = ["tp=2,ep=2", "pp=2,dp=2,ep=2", "tp=2,dp=2,ep=2", "tp=4,ep=4", "pp=4", "kv=2,pp=2", "kv=2,dp=2"]
CASES = [
    *(("int4", cut) for cut in CUTS),
    ("groups", "tp=2,ep=2"),
    ("groups", "kv=2,ep=2"),
    *(pytest.param(("int4", cut), marks=pytest.mark.soak) for cut in LONG_CUTS),
    *(pytest.param(("groups", cut), marks=pytest.mark.soak) for cut in (*CUTS, *LONG_CUTS[1:])),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories by name, and the draft head of the first."""
    root = tmp_path_factory.mktemp("parallel")
    for name, spec in MODELS.items():
        write_random_checkpoint(root / name, spec)
    write_random_head(root / "head")
    return {name: root / name for name in (*MODELS, "head")}


def options_of(models: dict[str, Path], name: str) -> RunnerOptions:
    head = models["head"] if name == "int4" else None
    return RunnerOptions(
        n_pages=64,
        block_tokens=BLOCK_TOKENS,
        threads=1,
        kv_dtype="float32",
        compute_dtype="float32",  # sums of bf16 products differ by more than the tolerance
        head_dir=head,
    )


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A model and its cut."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def one(case: tuple[str, str], models: dict[str, Path]) -> ModelRunner:
    return ModelRunner.load(models[case[0]], options_of(models, case[0]))


@pytest.fixture(scope="module")
def group(case: tuple[str, str], models: dict[str, Path]) -> Iterator[GroupRunner]:
    with forked_group(models[case[0]], options_of(models, case[0]), case[1]) as runner:
        yield runner


def make_batch(sequences: list[tuple[int, int]], *, want_features: bool = False) -> ForwardBatch:
    """(context, rows) of each sequence; their tokens are a function of sequence and position."""
    rows = [
        SequenceRows(
            seq_id=str(i),
            tokens=((np.arange(context) * 7 + i * 13) % 251).astype(np.uint32),
            pages=range(16 * i, 16 * i + 16),
            n_rows=n_rows,
            n_sampled=min(n_rows, 4),
            n_prompt=context,
            first_index=0,
            params=SamplingParams(),
            output_counts={},
            prompt_ids=None,
        )
        for i, (context, n_rows) in enumerate(sequences)
    ]
    return lay_out(rows, block_tokens=BLOCK_TOKENS, want_features=want_features)


# Prompts of several micro-batches; a decode step; drafts beside a chunk of a prompt; one sequence alone.
BATCHES = [
    make_batch([(200, 200), (33, 33), (1, 1), (17, 17)], want_features=True),
    make_batch([(201, 1), (34, 1), (2, 1), (18, 1)]),
    make_batch([(205, 4), (160, 126), (3, 1)], want_features=True),
    make_batch([(206, 1)]),
]


def test_logits_pages_and_features_equal_one_process(one: ModelRunner, group: GroupRunner) -> None:
    """A tied head has logits of up to 28, so there the bound is a share: one process with other kernels
    differs by as much."""
    is_tied = one.config.tie_word_embeddings
    for runner in (one, group):
        runner.cache.pages.zero_()
    for batch in BATCHES:
        expected, found = one.forward(batch), group.forward(batch)
        largest = float(expected.logits.abs().max()) if is_tied else 1.0
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=TOLERANCE * largest)
        assert (found.features is None) == (expected.features is None)
        if expected.features is not None and found.features is not None:
            torch.testing.assert_close(found.features, expected.features, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(group.cache.pages, one.cache.pages, rtol=0, atol=TOLERANCE)


def test_scores_of_a_prompt_equal_one_process(one: ModelRunner, group: GroupRunner) -> None:
    rows = np.array([0, 5, 198, 210, 232], np.int32)
    batch = replace(BATCHES[0], scored_rows=rows, scored_tokens=rows + np.int32(3), scored_top=5)
    expected, found = one.forward(batch).scores, group.forward(batch).scores
    assert expected is not None and found is not None
    assert len(found) == 5 and found.top_ids.shape == (5, 5)
    scale = float(np.abs(expected.logprobs).max()) if one.config.tie_word_embeddings else 1.0
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=TOLERANCE * scale)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, rtol=0, atol=TOLERANCE * scale)
    assert (np.abs(found.ranks - expected.ranks) <= 1).all()


def test_rows_are_the_same_bits_beside_others(group: GroupRunner) -> None:
    """Otherwise drafts and other sequences would change tokens."""
    group.forward(BATCHES[0])
    beside = group.forward(make_batch([(201, 1), (34, 1), (2, 1), (18, 1)])).logits[0]
    alone = group.forward(make_batch([(201, 1)])).logits[0]
    assert torch.equal(alone, beside)


def engine_of(runner: ModelRunner | GroupRunner) -> PagedEngine:
    return PagedEngine(TorchModel(runner, max_batch=8, max_draft_tokens=4), step_tokens=64)


def check_sequences(one: ModelRunner, group: GroupRunner) -> None:
    """Sequences with drafts and a shared prefix, on the group and on one process."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(0, 251, 40).tolist()
    specs = [
        make_spec("greedy", [*prefix, 5, 6]),
        make_spec("drawn", [*prefix, 9], temperature=0.9, top_p=0.9, seed=11),
        make_spec("long", rng.integers(0, 251, 90).tolist(), temperature=0.7, seed=12),
    ]
    expected = generate(engine_of(one), specs)
    engine = engine_of(group)
    assert generate(engine, specs) == expected
    again = engine.reserve(make_spec("again", [*prefix, 5, 6]))
    assert again.cached_tokens == 2 * BLOCK_TOKENS
    engine.release("again")

    def draft(outputs: object) -> dict[str, list[int]]:
        """Right drafts, then a wrong one."""
        made = {s.spec.seq_id: s.n_output for s in engine.sequences()}
        return {i: [*expected[i][n : n + 2], 7] for i, n in made.items() if i in expected}

    assert generate(engine, specs, draft) == expected


def test_sequences_with_drafts_and_a_shared_prefix_equal_one_process(
    one: ModelRunner, group: GroupRunner
) -> None:
    check_sequences(one, group)


def test_a_refused_or_aborted_batch_reaches_no_rank(one: ModelRunner, group: GroupRunner) -> None:
    wrong = make_batch([(5, 5)])
    wrong.token_ids[0] = one.config.vocab_size
    with pytest.raises(InvalidArgument):
        group.forward(wrong)
    stop = StopFlag()
    stop.set()
    with pytest.raises(StepAborted):
        group.forward(BATCHES[3], stop)
    assert group.forward(BATCHES[3]).logits.isfinite().all()

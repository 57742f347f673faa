"""Steps on fixed buffers, in the interpreter: the same bits as steps of exactly their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from libs.engine.core.torch_model import TorchModel
from libs.engine.graphs.decode_steps import DecodeSteps
from libs.engine.graphs.step_graphs import PlainSteps, StepGraph
from libs.engine.model.runner import ModelRunner
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.load_progress import LoadProgress
from libs.engine.step.step_model import SequenceRows
from libs.engine.step.types import SamplingParams
from tests.engine.graphs.tiny_models import (
    decode_batch,
    load_runner,
    make_model,
    multiply_row_by_row,
    write_checkpoint,
)
from tests.engine.random_head import write_random_head

N_PAGES = 8 * 40
N_BLOCKS = 40


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load_runner(write_checkpoint(tmp_path_factory.mktemp("tiny")), n_pages=N_PAGES)


@pytest.fixture
def steps(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> DecodeSteps:
    """New buffers, whose results are poisoned."""
    multiply_row_by_row(monkeypatch)
    monkeypatch.setattr(runner.loaded_kernels, "_processors", 8)
    steps = steps_of(make_model(runner, max_draft_tokens=5))
    steps.logits.fill_(torch.nan)
    return steps


def steps_of(model: TorchModel) -> DecodeSteps:
    steps = model._decode_steps
    assert steps is not None
    return steps


def poison(runner: ModelRunner, batch: ForwardBatch, *, seed: int) -> torch.Tensor:
    """Random KV in the contexts of a batch, NaN everywhere else; returns all of it."""
    pages = runner.cache.pages
    pages.fill_(torch.nan)
    block_tokens = pages.shape[2]
    generator = torch.Generator().manual_seed(seed)
    for sequence, n_tokens in enumerate(batch.context_len.tolist()):
        n_kept = n_tokens - int(np.diff(batch.query_start)[sequence])
        for block in range(-(-n_kept // block_tokens)):
            n_slots = min(n_kept - block * block_tokens, block_tokens)
            page = pages[int(batch.page_table[sequence, block])]
            page[:, :n_slots] = torch.randn(page[:, :n_slots].shape, generator=generator)
    return pages.clone()


CASES = [
    ([1], [1]),
    ([1] * 3, [17, 1, 64]),
    ([2, 1, 3], [40, 7, 100]),  # drafts of different lengths
    ([1], [600]),  # several splits
]
MORE_CASES = [
    ([1], [100]),
    ([1] * 5, [100, 3, 50, 16, 33]),
    ([1] * 7, [9, 99, 31, 70, 2, 16, 48]),
    ([4, 1, 1], [99, 64, 65]),
    ([5, 2], [99, 300]),  # in a bucket of six rows each
    ([1] * 3, [5, 640, 300]),
    ([2, 1, 4], [400, 257, 6]),
]


@pytest.mark.parametrize(
    ("rows", "contexts"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE_CASES)]
)
def test_a_padded_step_has_the_bits_of_the_step_without_padding(
    runner: ModelRunner, steps: DecodeSteps, rows: list[int], contexts: list[int]
) -> None:
    """Logits and KV alike; neither reads KV behind a context or of another page."""
    batch = decode_batch(rows, contexts, seed=len(rows), n_blocks=N_BLOCKS)
    before = poison(runner, batch, seed=1)
    wanted = runner.forward(batch).logits
    written = runner.cache.pages.clone()
    runner.cache.pages.copy_(before)
    actual = steps.forward(batch)
    assert actual is not None
    assert wanted.isfinite().all()
    assert torch.equal(actual.logits, wanted)
    assert torch.equal(runner.cache.pages.nan_to_num(123.0), written.nan_to_num(123.0))


def test_padding_changes_only_the_slots_of_the_rows(runner: ModelRunner, steps: DecodeSteps) -> None:
    """A bucket that held eight sequences runs three: what it held before is not written again."""
    full = decode_batch([1] * 8, [60] * 8, seed=3, n_blocks=N_BLOCKS)
    poison(runner, full, seed=3)
    assert steps.forward(full) is not None
    batch = decode_batch([1] * 5, [20, 33, 9, 47, 64], seed=4, n_blocks=N_BLOCKS)
    before = poison(runner, batch, seed=4).nan_to_num(123.0)
    assert steps.forward(batch) is not None
    changed = (runner.cache.pages.nan_to_num(123.0) != before).any(dim=(1, 3))  # [page, slot]
    last = batch.context_len - 1
    pages = batch.page_table[np.arange(5), last // 16]
    written = set(zip(pages.tolist(), (last % 16).tolist(), strict=True))
    assert set(map(tuple, changed.nonzero().tolist())) == written


def test_a_row_takes_the_token_that_the_step_before_chose(runner: ModelRunner, steps: DecodeSteps) -> None:
    batch = decode_batch([1] * 3, [20, 33, 9], seed=5, n_blocks=N_BLOCKS)
    poison(runner, batch, seed=5)
    steps.tokens[:4] = torch.tensor([7, 250, -1, 99])
    known = batch.token_ids.copy()
    known[[0, 2]] = (99, 250)
    wanted = runner.forward(replace(batch, token_ids=known)).logits
    steps._run_forward(batch, np.array([3, -1, 1], np.int32), None)
    assert torch.equal(steps.logits[:3], wanted)


@pytest.mark.parametrize(
    "change",
    [
        {"logit_rows": np.array([0], np.int32)},
        {"scored_rows": np.array([0], np.int32), "scored_tokens": np.array([1], np.int32)},
    ],
    ids=["a chunk of a prompt", "scored rows"],
)
def test_other_batches_have_no_bucket(steps: DecodeSteps, change: dict[str, Any]) -> None:
    batch = decode_batch([2, 1], [30, 8], seed=6, n_blocks=N_BLOCKS)
    assert steps.forward(replace(batch, **change)) is None
    assert steps.forward(decode_batch([7], [30], seed=6, n_blocks=N_BLOCKS)) is None  # more than 5 drafts
    assert steps.forward(decode_batch([1] * 9, [9] * 9, seed=6, n_blocks=1)) is None  # more than max_batch


class CountedSteps(PlainSteps):
    """Counts what would be captured."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def capture(self, name: str, step: Callable[[], None]) -> StepGraph:
        self.names.append(name)
        return super().capture(name, step)


def test_all_steps_are_captured_before_the_first_one(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures write no KV, report how far they are, and leave none for later."""
    multiply_row_by_row(monkeypatch)
    graphs, progress, seen = CountedSteps(), LoadProgress(), list[tuple[int, int]]()
    model = make_model(runner, max_batch=4, graphs=graphs)
    steps = steps_of(model)
    batch = decode_batch([1] * 3, [20, 33, 9], seed=7, n_blocks=N_BLOCKS)
    before = poison(runner, batch, seed=7).nan_to_num(123.0)
    steps.capture_all(lambda n_done, n_all: seen.append((n_done, n_all)))
    n_buckets = 3 * 4  # batches of 1, 2 and 4, with up to three drafts
    assert seen == [(n, n_buckets) for n in range(n_buckets + 1)]
    assert len(graphs.names) == n_buckets * 4
    for forward in steps._forwards.values():
        forward.replay()
    assert torch.equal(runner.cache.pages.nan_to_num(123.0), before)
    model.capture_decode_steps(progress)
    assert (progress.done_captures, progress.total_captures) == (n_buckets, n_buckets)
    wanted = runner.forward(batch).logits
    actual = steps.forward(batch)
    assert actual is not None
    assert torch.equal(actual.logits, wanted)
    rows = [make_rows(str(i), int(n), draws=i == 1) for i, n in enumerate(batch.context_len)]
    assert steps.launch(batch, rows) is not None
    assert steps.forward(decode_batch([2, 4], [20, 33], seed=8, n_blocks=N_BLOCKS)) is not None
    assert len(graphs.names) == n_buckets * 4, "a step that serves captures nothing"


def make_rows(seq_id: str, n_tokens: int, *, draws: bool) -> SequenceRows:
    params = SamplingParams(temperature=0.8 if draws else 0.0, top_p=0.9)
    return SequenceRows(seq_id, np.zeros(n_tokens, np.uint32), (), 1, 1, 1, n_tokens - 1, params, {}, None)


def test_features_of_a_padded_step_are_those_of_the_step(tmp_path: Path) -> None:
    write_random_head(tmp_path / "head")
    runner = load_runner(write_checkpoint(tmp_path / "model"), n_pages=12, head_dir=tmp_path / "head")
    steps = steps_of(make_model(runner, max_batch=4))
    batch = replace(decode_batch([2, 1, 1], [20, 9, 33], seed=8, n_blocks=4), want_features=True)
    poison(runner, batch, seed=8)
    wanted, actual = runner.forward(batch), steps.forward(batch)
    assert actual is not None
    assert wanted.features is not None
    assert actual.features is not None
    # The library chooses a product by its rows.
    torch.testing.assert_close(actual.features, wanted.features, rtol=1e-4, atol=1e-4)

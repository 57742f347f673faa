"""Decode steps as CUDA graphs: captured at all, the bits of the same step without a graph, and no wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from libs.engine.core.build import DecodeStepsName, EngineOptions, build_engine
from libs.engine.core.engine import PagedEngine
from libs.engine.core.torch_model import TorchModel
from libs.engine.graphs.step_graphs import MAX_GRAPH_BYTES, CudaGraphs, PlainSteps, StepGraphs
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.step_model import SequenceRows
from libs.engine.step.stop_flag import StopFlag
from libs.engine.step.types import SamplingParams, SequenceSpec
from tests.support.random_checkpoint import BENCH_CONFIG, RandomCheckpoint, write_random_checkpoint

pytestmark = pytest.mark.gpu

MAX_BATCH = 16
N_BLOCKS = 16
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, seed=2, top_p=0.9),
    SamplingParams(temperature=1.1, seed=3, top_k=40, min_p=0.01),
)


@pytest.fixture(scope="module", params=["float32", "auto"])
def runner(
    cuda: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ModelRunner:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, RandomCheckpoint(BENCH_CONFIG, quantization="int4"))
    options = RunnerOptions(n_pages=MAX_BATCH * N_BLOCKS, device=cuda, compute_dtype=request.param)
    runner = ModelRunner.load(path, options)
    runner.cache.pages.normal_()
    return runner


def make_model(runner: ModelRunner, graphs: StepGraphs | None) -> TorchModel:
    return TorchModel(runner, max_batch=MAX_BATCH, max_draft_tokens=3, graphs=graphs)


def step(
    n: int, rows_each: int, kind: SamplingParams, *, seed: int
) -> tuple[ForwardBatch, list[SequenceRows]]:
    random = np.random.default_rng(seed)
    contexts = random.integers(rows_each, N_BLOCKS * 64, n).astype(np.int32)
    starts = np.arange(n + 1, dtype=np.int32) * rows_each
    batch = ForwardBatch(
        token_ids=random.integers(0, 4096, n * rows_each).astype(np.int32),
        positions=(contexts[:, None] - rows_each + np.arange(rows_each)).flatten().astype(np.int32),
        query_start=starts,
        context_len=contexts,
        page_table=random.permutation(MAX_BATCH * N_BLOCKS).reshape(MAX_BATCH, N_BLOCKS)[:n].astype(np.int32),
        logit_rows=np.arange(n * rows_each, dtype=np.int32),
    )
    return batch, [
        SequenceRows(str(i), np.zeros(c, np.uint32), (), rows_each, rows_each, 1, i, kind, {}, None)
        for i, c in enumerate(contexts.tolist())
    ]


@pytest.mark.parametrize("rows_each", [1, 4])
@pytest.mark.parametrize("n", [1, 3, 11, 16])
def test_a_graph_has_the_bits_of_the_step_that_it_holds(runner: ModelRunner, n: int, rows_each: int) -> None:
    """Captured with one batch, replayed with others of other lengths."""
    graphs = CudaGraphs(runner.cache.pages.device)
    captured, plain = make_model(runner, graphs), make_model(runner, PlainSteps())
    for seed, kind in enumerate((*KINDS, *KINDS)):
        batch, rows = step(n, rows_each, kind, seed=seed)
        before = runner.cache.pages.clone()
        wanted = plain.run(batch, rows, StopFlag()).tokens
        logits, written = steps_logits(plain, batch), runner.cache.pages.clone()
        runner.cache.pages.copy_(before)
        assert captured.run(batch, rows, StopFlag()).tokens == wanted
        assert torch.equal(steps_logits(captured, batch), logits)
        assert torch.equal(runner.cache.pages, written)
        assert -1 not in wanted
    assert graphs.n_graphs == 4, "one forward pass, and greedy, drawn and cut choices"


def steps_logits(model: TorchModel, batch: ForwardBatch) -> torch.Tensor:
    assert model._decode_steps is not None
    return model._decode_steps.logits[: batch.n_rows].clone()


def test_all_steps_are_captured_within_their_memory(runner: ModelRunner) -> None:
    graphs = CudaGraphs(runner.cache.pages.device)
    model = make_model(runner, graphs)
    before = runner.cache.pages.clone()
    model.capture_decode_steps()
    n_graphs = 5 * 4 * 4  # batches of 1, 2, 4, 8 and 16, one to four rows each, a pass and three choices
    assert graphs.n_graphs == n_graphs
    assert 0 <= graphs.held_bytes <= MAX_GRAPH_BYTES
    assert torch.equal(runner.cache.pages, before)
    for n, rows_each in ((1, 1), (5, 2), (16, 4)):
        assert model.run(*step(n, rows_each, KINDS[2], seed=n), StopFlag()).tokens
    assert graphs.n_graphs == n_graphs, "a step that serves captures nothing"


def test_without_memory_for_graphs_steps_are_called(runner: ModelRunner) -> None:
    graphs = CudaGraphs(runner.cache.pages.device, max_bytes=0)
    batch, rows = step(3, 1, KINDS[2], seed=9)
    wanted = make_model(runner, PlainSteps()).run(batch, rows, StopFlag()).tokens
    assert make_model(runner, graphs).run(batch, rows, StopFlag()).tokens == wanted
    assert graphs.n_graphs == 0


def test_a_step_that_waits_is_not_captured_and_still_runs(runner: ModelRunner) -> None:
    graphs = CudaGraphs(runner.cache.pages.device)
    values = torch.zeros(3, device=runner.cache.pages.device)

    def waits() -> None:
        values.add_(1 if float(values.sum()) >= 0 else 2)

    graph = graphs.capture("a step that waits", waits)
    before = float(values[0])
    graph.replay()
    assert float(values[0]) == before + 1
    assert graphs.n_graphs == 0
    batch, rows = step(2, 1, KINDS[0], seed=3)  # and captures go on
    assert make_model(runner, graphs).run(batch, rows, StopFlag()).tokens
    assert graphs.n_graphs == 2


def test_after_a_failed_capture_memory_that_is_short_is_freed(runner: ModelRunner) -> None:
    """The allocator frees what it keeps while it counts no capture."""
    device = runner.cache.pages.device
    values = torch.zeros(3, device=device)

    def waits() -> None:
        values.add_(float(values.sum()))

    CudaGraphs(device).capture("a step that waits", waits)
    torch.cuda.empty_cache()
    free_bytes = torch.cuda.mem_get_info(device)[0]
    for share in (0.5, 0.6, 0.7):  # each is larger than what the one before left in the allocator
        torch.empty(int(share * free_bytes), dtype=torch.uint8, device=device)


@contextmanager
def refused_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS, ids=["greedy", "drawn", "top-p", "top-k"])
def test_a_step_is_launched_without_a_wait(runner: ModelRunner, kind: SamplingParams) -> None:
    model = make_model(runner, CudaGraphs(runner.cache.pages.device))
    batch, rows = step(5, 1, kind, seed=4)
    known, unknown = np.full(5, -1, np.int32), np.arange(5, dtype=np.int32)
    model.launch(batch, rows, known).result()
    with refused_waits():
        first = model.launch(batch, rows, known)
        second = model.launch(batch, rows, unknown)
    assert len(first.result().tokens) == len(second.result().tokens) == 5


def streams(engine: PagedEngine, params: Sequence[SamplingParams]) -> dict[str, list[int]]:
    for index, each in enumerate(params):
        prompt = np.random.default_rng(index).integers(0, 4096, 40 + 7 * index).astype(np.uint32)
        engine.reserve(SequenceSpec(str(index), prompt, each))
        engine.start(str(index))
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(params))}
    while engine.has_work():
        for output in engine.step(features=False):
            assert output.failure is None
            tokens[output.seq_id] += output.tokens
            if output.finish is not None:
                engine.release(output.seq_id)
    assert engine.ledger().pages_held == 0
    return tokens


def test_an_engine_gives_the_same_streams_with_all_three_kinds_of_steps(cuda: str, tmp_path: Path) -> None:
    """In fp32, where a product of other rows changes no choice."""
    write_random_checkpoint(tmp_path, RandomCheckpoint(BENCH_CONFIG, quantization="int4"))
    stops = tuple(range(0, 4096, 16))
    params = [
        replace(
            kind,
            seed=kind.seed + index,
            max_tokens=20 + index,
            stop_token_ids=stops if index % 2 else (),
        )
        for index, kind in enumerate((*KINDS, *KINDS))
    ]
    found: dict[str, dict[str, list[int]]] = {}
    for name in get_args(DecodeStepsName):
        options = EngineOptions(
            n_pages=200,
            device=cuda,
            compute_dtype="float32",
            kv_dtype="float32",
            max_batch=MAX_BATCH,
            decode_steps=name,
        )
        engine = build_engine(tmp_path, options)
        assert isinstance(engine.model, TorchModel)
        assert (engine.model._decode_steps is None) == (name == "plain")
        assert (engine._ahead is None) == (name != "ahead")
        found[name] = streams(engine, params)
    assert found["graphs"] == found["plain"]
    assert found["ahead"] == found["plain"]

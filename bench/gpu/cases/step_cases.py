"""Whole steps of a model with random weights: decode against the floor, prefill against the bf16 product.

A step is all that the engine's model does: plan, upload, layers, logits, greedy tokens in the host. The
scheduler is not in it. Contexts are random pages, so that no prompt has to be computed first.

Decode steps run three times: program by program, as a graph, and as graphs that begin before the tokens of
the last one are read. The latter two state how many times as fast they are as the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.gpu.case import Bench, Figure, ReportCase
from bench.gpu.counting.model_shapes import tiny
from bench.gpu.counting.step_work import StepShape, step_works
from bench.gpu.counting.work import total_work
from bench.gpu.timing import busy_us, wall_us
from libs.engine.core.torch_model import TorchModel
from libs.engine.graphs.step_graphs import CudaGraphs, PlainSteps, StepGraphs
from libs.engine.model.runner import ModelRunner
from libs.engine.model_spec.config import ModelConfig
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.step_model import SequenceRows
from libs.engine.step.stop_flag import StopFlag
from libs.engine.step.types import SamplingParams

_MOST_REPEATS = 10
_CHAIN, _SHORT_CHAIN = 16, 2  # steps that follow one another; the last is read without another behind it


@dataclass(frozen=True, slots=True)
class StepSizes:
    decode: tuple[StepShape, ...]
    prefill: tuple[StepShape, ...]
    block_tokens: int

    @property
    def n_pages(self) -> int:
        """Those of the largest step."""
        return max(s.batch * -(-s.context // self.block_tokens) for s in (*self.decode, *self.prefill))


FULL_STEPS = StepSizes(
    decode=tuple(StepShape(batch, 2048) for batch in (1, 32, 256)),
    prefill=tuple(StepShape(1, rows, rows, expands=True) for rows in (2048, 8192)),
    block_tokens=64,
)
SMALL_STEPS = StepSizes((StepShape(1, 20), StepShape(2, 33)), (StepShape(1, 12, 12, expands=True),), 16)


def step_cases(bench: Bench, config: Callable[[], ModelConfig]) -> Iterator[ReportCase]:
    """One model serves all cases; the first that is measured makes it."""
    sizes = SMALL_STEPS if bench.is_miniature else FULL_STEPS
    subject = StepSubject(bench, tiny() if bench.is_miniature else config(), sizes)
    for step in sizes.decode:
        setting = f"{step.batch} sequences of {step.context} tokens"
        yield ReportCase("decode_step", setting, partial(subject.measure, step))
        yield ReportCase("decode_graph", setting, partial(subject.measure_graph, step))
        yield ReportCase("decode_ahead", setting, partial(subject.measure_ahead, step))
    for step in sizes.prefill:
        yield ReportCase("prefill", f"{step.rows} tokens", partial(subject.measure, step))


class StepSubject:
    def __init__(self, bench: Bench, config: ModelConfig, sizes: StepSizes) -> None:
        self._bench = bench
        self._config = config
        self._sizes = sizes
        self._distinct: dict[StepShape, list[int] | None] = {}  # experts that each layer reads
        self._plain_us: dict[StepShape, float] = {}

    @cached_property
    def _runner(self) -> ModelRunner:
        from bench.gpu.cases.random_model import RandomModel

        return RandomModel(self._config, self._bench.device).runner(
            n_pages=self._sizes.n_pages, block_tokens=self._sizes.block_tokens
        )

    @cached_property
    def _model(self) -> TorchModel:
        return self._model_on(None)

    @cached_property
    def _graph_model(self) -> TorchModel:
        """On a CPU its steps run on fixed buffers, and are called."""
        is_cuda = self._bench.device.type == "cuda"
        return self._model_on(CudaGraphs(self._bench.device) if is_cuda else PlainSteps())

    def _model_on(self, graphs: StepGraphs | None) -> TorchModel:
        max_batch = max(s.batch for s in self._sizes.decode)
        return TorchModel(self._runner, max_batch=max_batch, max_draft_tokens=0, graphs=graphs)

    def measure(self, step: StepShape) -> Figure:
        batch, rows = self._batch(step)
        run = partial(self._model.run, batch, rows, StopFlag())
        with recorded_choices() as choices:
            run()
        self._distinct[step] = [len(set(ids.flatten().tolist())) for ids in choices] or None
        device = self._bench.device
        taken_us = wall_us(run, device, min(self._bench.repeats, _MOST_REPEATS))
        self._plain_us[step] = taken_us
        return {"busy_us": busy_us(run, device)} | self._figure(step, taken_us)

    def measure_graph(self, step: StepShape) -> Figure:
        batch, rows = self._batch(step)
        run = partial(self._graph_model.run, batch, rows, StopFlag())
        has_same_tokens = run().tokens == self._model.run(batch, rows, StopFlag()).tokens
        taken_us = wall_us(run, self._bench.device, min(self._bench.repeats, _MOST_REPEATS))
        figure = {"busy_us": busy_us(run, self._bench.device), "has_same_tokens": has_same_tokens}
        return figure | self._figure(step, taken_us) | self._ratio(step, taken_us)

    def measure_ahead(self, step: StepShape) -> Figure:
        """The time of a step in a chain of them, each of which takes the tokens that the last one chose."""
        batch, rows = self._batch(step)
        model, sources = self._graph_model, np.arange(step.batch, dtype=np.int32)
        n_steps = _SHORT_CHAIN if self._bench.is_miniature else _CHAIN

        def run() -> None:
            launched = model.launch(batch, rows, np.full_like(sources, -1))
            for _ in range(n_steps - 1):
                following = model.launch(batch, rows, sources)
                launched.result()
                launched = following
            launched.result()

        run()
        taken_us = wall_us(run, self._bench.device, min(self._bench.repeats, _MOST_REPEATS)) / n_steps
        return self._figure(step, taken_us) | self._ratio(step, taken_us)

    def _ratio(self, step: StepShape, taken_us: float) -> Figure:
        """Beside the step program by program, where that was measured."""
        return {"ratio": self._plain_us[step] / taken_us} if step in self._plain_us else {}

    def _figure(self, step: StepShape, taken_us: float) -> Figure:
        distinct = self._distinct.get(step)
        works = list(step_works(self._config, step, distinct))
        floor_us = self._bench.ceilings.floor_us(works)
        return {
            "wall_us": taken_us,
            "floor_us": floor_us,
            "floor_share": floor_us / taken_us,
            "tokens_per_s": step.n_rows / taken_us * 1e6,
            "experts_a_layer": None if distinct is None else sum(distinct) / len(distinct),
            **self._bench.ceilings.shares(total_work(works), taken_us),
        }

    def _batch(self, step: StepShape) -> tuple[ForwardBatch, list[SequenceRows]]:
        random = np.random.default_rng(step.batch)
        n_blocks = -(-step.context // self._sizes.block_tokens)
        table = random.permutation(step.batch * n_blocks).astype(np.int32).reshape(step.batch, n_blocks)
        tokens = random.integers(0, self._config.vocab_size, (step.batch, step.context)).astype(np.int32)
        positions = np.arange(step.context - step.rows, step.context, dtype=np.int32)
        starts = np.arange(step.batch + 1, dtype=np.int32) * step.rows
        batch = ForwardBatch(
            token_ids=tokens[:, -step.rows :].flatten(),
            positions=np.tile(positions, step.batch),
            query_start=starts,
            context_len=np.full(step.batch, step.context, np.int32),
            page_table=table,
            logit_rows=starts[1:] - 1,
        )
        return batch, [_greedy(index, line, step) for index, line in enumerate(tokens)]


def _greedy(index: int, tokens: np.ndarray, step: StepShape) -> SequenceRows:
    return SequenceRows(
        seq_id=str(index),
        tokens=tokens.astype(np.uint32),
        pages=(),
        n_rows=step.rows,
        n_sampled=step.n_logits,
        n_prompt=step.context,
        first_index=0,
        params=SamplingParams(temperature=0.0),
        output_counts={},
        prompt_ids=None,
    )


@contextmanager
def recorded_choices() -> Iterator[list[torch.Tensor]]:
    """The experts [T, k] that each call of the router chooses."""
    from libs.engine.kernels.gpu import router, triton_kernels

    choose = router.choose_experts
    found: list[torch.Tensor] = []

    def record(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = choose(*arguments, **options)
        found.append(ids)
        return ids, weights

    with mock.patch.object(triton_kernels, "choose_experts", record):
        yield found

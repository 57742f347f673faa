"""The sampler on logits of the device: greedy, filtered, with penalties, with masks of structured output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from bench.gpu.case import Bench, Figure, ReportCase
from bench.gpu.counting.work import sampling_work
from bench.gpu.timing import wall_us
from libs.engine.sampling.sampler import sample
from libs.engine.step.constraint import StepMasks
from libs.engine.step.step_model import SequenceRows
from libs.engine.step.types import SamplingParams

_VOCAB_SIZE = 163840
_PROMPT = np.arange(64, dtype=np.int64)
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "top_k_top_p": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=3),
    "penalties": SamplingParams(temperature=0.8, presence_penalty=0.5, repetition_penalty=1.1, seed=3),
    "masks": SamplingParams(temperature=0.0),
}


def sampling_cases(bench: Bench) -> Iterator[ReportCase]:
    for n_rows in (1, 3) if bench.is_miniature else (1, 32, 256):
        for kind in KINDS:
            yield ReportCase("sample", f"{kind}, {n_rows} rows", partial(_measure, bench, kind, n_rows))


def sampling_run(
    device: torch.device, kind: str, n_rows: int, vocab_size: int
) -> tuple[torch.Tensor, Callable[[], list[int]]]:
    """Logits, and a run that samples from them. Penalties change them from run to run."""
    logits = torch.randn(n_rows, vocab_size, device=device) * 3
    rows = [_row(index, KINDS[kind]) for index in range(n_rows)]
    masks = None
    if kind == "masks":
        words = np.random.default_rng(1).integers(-(2**31), 2**31, (n_rows, -(-vocab_size // 32)))
        masks = StepMasks(list(range(n_rows)), words.astype(np.int32), [])
    return logits, lambda: sample(logits, rows, masks)[0]


def _measure(bench: Bench, kind: str, n_rows: int) -> Figure:
    vocab_size = 500 if bench.is_miniature else _VOCAB_SIZE
    _, run = sampling_run(bench.device, kind, n_rows, vocab_size)
    taken_us = wall_us(run, bench.device, bench.repeats)
    return {"wall_us": taken_us} | bench.ceilings.shares(sampling_work(vocab_size, n_rows), taken_us)


def _row(index: int, params: SamplingParams) -> SequenceRows:
    penalised = params.repetition_penalty != 1.0
    return SequenceRows(
        seq_id=str(index),
        tokens=np.arange(70, dtype=np.uint32),
        pages=(),
        n_rows=1,
        n_sampled=1,
        n_prompt=len(_PROMPT),
        first_index=6,
        params=params,
        output_counts={64 + i: 1 for i in range(6)} if penalised else {},
        prompt_ids=_PROMPT if penalised else None,
    )

"""What the benchmark of the engine measures, on any subject: ours or a peer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from libs.engine.core.engine import PagedEngine
from libs.engine.step.types import SamplingParams, SequenceSpec

Clock = Callable[[], float]
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """What is measured."""

    prefill_tokens: int = 2048
    decode_batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 128
    output_tokens: int = 128
    repeats: int = 3
    clock: Clock = time.perf_counter


class Subject(Protocol):
    """Something that generates: seconds it takes for random prompts [B][tokens]."""

    name: str
    torch_threads: int

    def prefill_s(self, prompt: np.ndarray, clock: Clock) -> float: ...

    def decode_s(self, prompts: np.ndarray, output_tokens: int, clock: Clock) -> float:
        """Time of the tokens after the first of each sequence."""
        ...


class EngineSubject:
    """The engine as a service drives it: reserve, start, step, release."""

    def __init__(self, engine: PagedEngine, name: str = "slipstream") -> None:
        self.name = name
        self.torch_threads = torch.get_num_threads()
        self._engine = engine
        self._n_sequences = 0

    def prefill_s(self, prompt: np.ndarray, clock: Clock) -> float:
        start = clock()
        self._start(prompt[None], max_tokens=1)
        self._run(lambda: False)
        return clock() - start

    def decode_s(self, prompts: np.ndarray, output_tokens: int, clock: Clock) -> float:
        waiting = self._start(prompts, max_tokens=output_tokens)
        self._run(lambda: not waiting, waiting)
        start = clock()
        self._run(lambda: False)
        return clock() - start

    def _start(self, prompts: np.ndarray, max_tokens: int) -> set[str]:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        names = set()
        for prompt in prompts:
            self._n_sequences += 1
            name = str(self._n_sequences)
            self._engine.reserve(SequenceSpec(name, prompt.astype(np.uint32), sampling))
            self._engine.start(name)
            names.add(name)
        return names

    def _run(self, enough: Callable[[], bool], waiting: set[str] | None = None) -> None:
        """Steps until `enough` or all done; takes those that emit out of `waiting`."""
        while self._engine.has_work() and not enough():
            for output in self._engine.step():
                if output.failure is not None:
                    raise output.failure
                if waiting is not None and output.tokens:
                    waiting.discard(output.seq_id)
                if output.finish is not None:
                    self._engine.release(output.seq_id)


def measure(shape: Shape, subjects: Sequence[Subject], vocab_size: int) -> dict[str, dict[str, float]]:
    """Tokens per second by subject and figure: `prefill`, `decode_1`, ..."""
    random = np.random.default_rng(0)
    rates: dict[str, dict[str, float]] = {subject.name: {} for subject in subjects}

    def run(figure: str, n_tokens: int, n_prompts: int, length: int, timed: Callable[..., float]) -> None:
        for subject in subjects:
            seconds = []
            torch.set_num_threads(subject.torch_threads)
            for repeat in range(shape.repeats + 1):
                warm_up = repeat == 0  # of caches and allocators
                elapsed = timed(subject, random.integers(0, vocab_size, (n_prompts, length)), warm_up)
                if not warm_up:
                    seconds.append(elapsed)
            rates[subject.name][figure] = round(n_tokens / statistics.median(seconds), 1)

    def prefill(subject: Subject, prompts: np.ndarray, _warm_up: bool) -> float:
        return subject.prefill_s(prompts[0], shape.clock)

    def decode(subject: Subject, prompts: np.ndarray, warm_up: bool) -> float:
        n = min(_WARM_UP_TOKENS, shape.output_tokens) if warm_up else shape.output_tokens
        return subject.decode_s(prompts, n, shape.clock)

    run("prefill", shape.prefill_tokens, 1, shape.prefill_tokens, prefill)
    for batch in shape.decode_batches:
        n_decoded = batch * (shape.output_tokens - 1)
        run(f"decode_{batch}", n_decoded, batch, shape.prompt_tokens, decode)
    return rates

"""Runs engines until they have no work and collects their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from libs.common.block_hash import TokenArray
from libs.engine.core.engine import PagedEngine
from libs.engine.step.types import FullBlock, SamplingParams, SequenceSpec, StepOutput

# Called before each step with the outputs of the last one; returns drafts for the next.
Draft = Callable[[Sequence[StepOutput]], Mapping[str, Sequence[int]]]


@dataclass
class Transcript:
    """All outputs of one engine run, by sequence."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, StepOutput] = field(default_factory=dict)
    outputs: list[StepOutput] = field(default_factory=list)
    steps: int = 0

    def blocks(self, seq_id: str) -> list[FullBlock]:
        return [b for o in self.outputs if o.seq_id == seq_id for b in o.new_full_blocks]


def no_drafts(_: Sequence[StepOutput]) -> Mapping[str, Sequence[int]]:
    return {}


def drive(engine: PagedEngine, draft: Draft = no_drafts, *, max_steps: int = 10_000) -> Transcript:
    """Step until there is no work; check the engine's accounting after each step."""
    transcript = Transcript()
    outputs: list[StepOutput] = []
    while engine.has_work():
        outputs = engine.step(draft(outputs))
        check_accounting(engine)
        transcript.steps += 1
        assert transcript.steps < max_steps, "the engine makes no progress"
        for output in outputs:
            transcript.tokens.setdefault(output.seq_id, []).extend(output.tokens)
            transcript.last[output.seq_id] = output
            transcript.outputs.append(output)
            if output.failure is not None:
                engine.release(output.seq_id)
    return transcript


def check_accounting(engine: PagedEngine) -> None:
    engine.check()
    ledger = engine.ledger()
    assert ledger.pages_free + ledger.pages_cached + ledger.pages_held == engine.info.n_pages


def generate(
    engine: PagedEngine, specs: Sequence[SequenceSpec], draft: Draft = no_drafts
) -> dict[str, list[int]]:
    """Run all specs together, release them, and return their tokens."""
    for spec in specs:
        engine.reserve(spec)
        engine.start(spec.seq_id)
    transcript = drive(engine, draft)
    for spec in specs:
        engine.release(spec.seq_id)
    return transcript.tokens


def make_spec(seq_id: str, prompt: Sequence[int] | TokenArray, **params: object) -> SequenceSpec:
    """Build a spec that samples greedily by default."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})  # type: ignore[arg-type]
    return SequenceSpec(seq_id=seq_id, prompt=np.asarray(prompt, dtype=np.uint32), sampling=sampling)

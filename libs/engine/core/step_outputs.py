"""Split a step's result into the parts of its sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from libs.engine.scheduling.scheduler import Slice
from libs.engine.step.device_rows import FeatureArray
from libs.engine.step.prompt_scores import PromptScores
from libs.engine.step.step_model import SequenceRows, StepResult
from libs.engine.step.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The model's result for one sequence of a step."""

    rows: SequenceRows
    n_drafts: int
    tokens: Sequence[int]
    logprobs: tuple[TokenLogprobs, ...] | None
    features: FeatureArray | None  # of all rows
    shared_tokens: int = 0  # copied from another prompt right before the step
    scores: PromptScores | None = None


def split_result(
    result: StepResult, rows: Sequence[SequenceRows], slices: Sequence[Slice], shared: Mapping[str, int]
) -> Iterator[StepOutputs]:
    """The part of each sequence, in the order of `rows` and their `slices`."""
    row = sampled = scored = 0
    for part, piece in zip(rows, slices, strict=True):
        stop_row, stop_sampled = row + part.n_rows, sampled + part.n_sampled
        stop_scored = scored + len(part.scored)
        logprobs = result.logprobs[sampled:stop_sampled] if result.logprobs else ()
        yield StepOutputs(
            rows=part,
            n_drafts=piece.n_drafts,
            tokens=result.tokens[sampled:stop_sampled],
            logprobs=tuple(p for p in logprobs if p is not None) or None,
            features=None if result.features is None else result.features[row:stop_row],
            shared_tokens=shared.get(part.seq_id, 0),
            scores=_scores(result, part, slice(scored, stop_scored)),
        )
        row, sampled, scored = stop_row, stop_sampled, stop_scored


def _scores(result: StepResult, part: SequenceRows, rows: slice) -> PromptScores | None:
    if result.scores is None or not len(part.scored):
        return None
    first = len(part.tokens) - part.n_rows + 1
    return result.scores.part(rows, first=first, top=part.params.prompt_logprobs or 0)

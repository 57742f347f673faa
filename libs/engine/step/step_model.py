"""The interface between the engine's bookkeeping and its model: rows in, sampled tokens out.

`libs/engine/core/torch_model.py` computes with ModelRunner and the sampler. `libs/engine/core/fake.py` is
deterministic, for tests of services.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from libs.common.block_hash import TokenArray
from libs.engine.step.batch import ForwardBatch, Int32Array
from libs.engine.step.constraint import TokenConstraint
from libs.engine.step.device_rows import FeatureArray
from libs.engine.step.page_parts import PageParts
from libs.engine.step.prompt_scores import PromptScores
from libs.engine.step.stop_flag import StopFlag
from libs.engine.step.types import DeviceBytes, EngineInfo, SamplingParams, TokenLogprobs

BAD_TOKEN = -1  # stands for the token of a row without finite logits


def no_tokens() -> TokenArray:
    """An empty array."""
    return np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's rows of a step.

    The last row is that of tokens[-1]; drafts, if any, are the last `n_sampled - 1` tokens. Rows
    that are sampled are the last `n_sampled`; row j of them gives output token `first_index + j`.
    """

    seq_id: str
    tokens: TokenArray  # the whole history of the last row, drafts included
    pages: Sequence[int]
    n_rows: int
    n_sampled: int  # 0 for a prefill chunk that is not the last
    n_prompt: int
    first_index: int
    params: SamplingParams
    # output token -> count, without drafts; only with a penalty
    output_counts: Mapping[int, int]
    prompt_ids: npt.NDArray[np.int64] | None  # distinct ids; only with repetition_penalty
    constraint: TokenConstraint | None = None  # in the state before the drafts
    # The prompt tokens that the first rows predict, where they are asked for.
    scored: TokenArray = field(default_factory=no_tokens)

    @property
    def drafts(self) -> list[int]:
        """The drafts of a sampled sequence."""
        drafts: list[int] = self.tokens[len(self.tokens) - self.n_sampled + 1 :].tolist()
        return drafts


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens` and `logprobs` [R] of the sampled rows in order; None for rows without logprobs."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None] | None
    features: FeatureArray | None  # [T, feature_width], all rows
    scores: PromptScores | None = None  # of all scored tokens in order


class StepModel(Protocol):
    """Computes one step. Its state is the KV memory alone."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def memory(self) -> memoryview | DeviceBytes: ...

    @property
    def memory_address(self) -> int: ...

    @property
    def page_parts(self) -> PageParts | None:
        """The parts of pages that steps write outside of `memory`; None: they write all in `memory`."""
        ...

    def run(self, batch: ForwardBatch, rows: Sequence[SequenceRows], stop: StopFlag) -> StepResult:
        """Write the KV of all rows and sample. An error changes no sequence. Nothing of it runs afterwards.

        Raises StepAborted soon after `stop` was set; then a later step computes the rows' KV again.
        """
        ...

    def close(self) -> None:
        """End other processes of the model. No step runs or follows; `memory` stays. Idempotent."""
        ...


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step."""
        ...


@runtime_checkable
class AheadModel(StepModel, Protocol):
    """A model that begins a step before the tokens of the step before it are known."""

    def can_launch(self, rows: Sequence[SequenceRows]) -> bool:
        """Whether the host has no part in these rows between their launch and their tokens."""
        ...

    def launch(self, batch: ForwardBatch, rows: Sequence[SequenceRows], sources: Int32Array) -> PendingStep:
        """Begin to write the KV of all rows and to sample; launched steps run in their order.

        Row i takes the token of row sources[i] of the step that was launched before; where that is -1, the
        batch's. No `run` may come between the two. After an error nothing of any launched step still runs.
        """
        ...


def lay_out(rows: Sequence[SequenceRows], *, block_tokens: int, want_features: bool) -> ForwardBatch:
    """The batch that computes `rows`, in their order."""
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([r.n_rows for r in rows], out=starts[1:])
    context_len = np.array([len(r.tokens) for r in rows], dtype=np.int32)
    n_blocks = -(-context_len // block_tokens)
    page_table = np.zeros((len(rows), int(n_blocks.max())), dtype=np.int32)
    for i, r in enumerate(rows):
        page_table[i, : n_blocks[i]] = r.pages[: n_blocks[i]]
    positions = [np.arange(len(r.tokens) - r.n_rows, len(r.tokens), dtype=np.int32) for r in rows]
    logit_rows = [
        np.arange(starts[i + 1] - r.n_sampled, starts[i + 1], dtype=np.int32) for i, r in enumerate(rows)
    ]
    scored_rows = [np.arange(start, start + len(r.scored)) for start, r in zip(starts, rows, strict=False)]
    return ForwardBatch(
        token_ids=np.concatenate([r.tokens[len(r.tokens) - r.n_rows :] for r in rows]).astype(np.int32),
        positions=np.concatenate(positions),
        query_start=starts,
        context_len=context_len,
        page_table=page_table,
        logit_rows=np.concatenate(logit_rows),
        want_features=want_features,
        scored_rows=np.concatenate(scored_rows).astype(np.int32),
        scored_tokens=np.concatenate([r.scored for r in rows]).astype(np.int32),
        scored_top=max([r.params.prompt_logprobs or 0 for r in rows]),
    )

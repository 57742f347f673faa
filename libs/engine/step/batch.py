"""The input and output of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from libs.engine.step.prompt_scores import PromptScores

if TYPE_CHECKING:
    import torch

Int32Array = npt.NDArray[np.int32]


def _no_rows() -> Int32Array:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Query rows of S sequences, concatenated: prefill chunks, single decode rows and verify rows alike.

    token_ids [T] i32     input token of each query row
    positions [T] i32     absolute position of each row; the rows of sequence s are its last ones:
                          context_len[s] - n_rows(s) ... context_len[s] - 1, ascending
    query_start [S+1] i32 rows of sequence s are query_start[s] ... query_start[s+1] - 1
    context_len [S] i32   tokens of latent KV that the sequence has after this step
    page_table [S, P] i32 cache page of each block; only ceil(context_len / block_tokens) entries are read
    logit_rows [R] i32    rows whose logits are wanted, in the order of the output
    want_features         also return the EAGLE-3 features of all T rows (ignored without a feature head)
    scored_rows [P] i32   prompt rows whose next token is scored
    scored_tokens [P] i32 the tokens that follow these rows
    scored_top            how many of the most likely tokens each score names
    """

    token_ids: Int32Array
    positions: Int32Array
    query_start: Int32Array
    context_len: Int32Array
    page_table: Int32Array
    logit_rows: Int32Array
    want_features: bool = False
    scored_rows: Int32Array = field(default_factory=_no_rows)
    scored_tokens: Int32Array = field(default_factory=_no_rows)
    scored_top: int = 0

    @property
    def n_rows(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def n_sequences(self) -> int:
        return int(self.context_len.shape[0])


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """logits [R, V] fp32, ordered as `ForwardBatch.logit_rows`; features [T, H] fp32 if wanted, else None.

    scores: of the scored tokens in the order of `ForwardBatch.scored_rows`, None without any.
    """

    logits: torch.Tensor
    features: torch.Tensor | None
    scores: PromptScores | None = None

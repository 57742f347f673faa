"""Log probabilities of a prompt's tokens, in the arrays that go from the model to the wire."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from libs.common.block_hash import TokenArray

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Row i belongs to the prompt token at position `first` + i, given the tokens before it.

    Natural logarithms under the model, before any sampling parameter. A rank of 1 is the most likely token's.
    """

    first: int
    logprobs: Float32Array  # [R]
    ranks: Int32Array  # [R]
    top_ids: Int32Array  # [R, N], most likely first
    top_logprobs: Float32Array  # [R, N]

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def is_finite(self) -> bool:
        """False after an overflow in the model."""
        return bool(np.isfinite(self.logprobs).all())

    def part(self, rows: slice, *, first: int, top: int) -> PromptScores:
        """Some of the rows, with at most `top` likely tokens; `first`: the position of the first row."""
        return PromptScores(
            first,
            self.logprobs[rows],
            self.ranks[rows],
            self.top_ids[rows, :top],
            self.top_logprobs[rows, :top],
        )


def scored_tokens(tokens: TokenArray, *, start: int, stop: int, n_prompt: int) -> TokenArray:
    """The prompt tokens that the rows at positions [start, stop) predict.

    The prompt's first token is predicted by no row, and its last row predicts the first generated token.
    """
    return tokens[start + 1 : min(stop + 1, n_prompt)]

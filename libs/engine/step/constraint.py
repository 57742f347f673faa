"""The interface of structured output: what restricts the tokens of a sequence.

`libs/structured/` implements it. The engine knows no grammar and no text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

# Row r, bit t: whether sampled row r may have token t. Little-endian bits in words of 32.
MaskRows = npt.NDArray[np.int32]


class MaskFiller(Protocol):
    """Computes the masks of many sequences at once."""

    def fill(
        self, work: Sequence[tuple[Any, Sequence[int]]], masks: MaskRows
    ) -> Sequence[tuple[int, ...] | None]:
        """Write the masks of each constraint and its drafts, row after row.

        Returns for each row None, or the tokens that it may not sample when it needs no mask.
        """
        ...


class TokenConstraint(Protocol):
    """The state of one sequence's grammar. One thread at a time calls it."""

    # Why the sequence cannot continue; empty while it can.
    failure: str
    field: str  # of the client's request, for that failure
    # Whether the sequence ends as it does for its limit of tokens, and not as the model would.
    is_closing: bool

    @property
    def filler(self) -> MaskFiller:
        """The filler of this constraint, the same for all of a worker."""
        ...

    def count_allowed(self, drafts: Sequence[int]) -> int:
        """How many leading drafts the grammar allows."""
        ...

    def settle(self, drafts: Sequence[int], token: int) -> Collection[int]:
        """What may come after `drafts` in place of a sampled token; empty: that token may."""
        ...

    def needs_mask(self, drafts: Sequence[int]) -> bool:
        """Whether the next token, or the one after a draft, has a mask that takes time to compute."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Take emitted tokens."""
        ...


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Tokens that the sampled rows of a step may not take. `masked` are the rows of `masks`, in order."""

    masked: Sequence[int]
    masks: MaskRows
    banned: Sequence[tuple[int, int]]  # (row, token)

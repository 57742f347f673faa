"""The interface of a draft head for drafting, whether a drafter's service runs it or a decode worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from libs.common.block_hash import TokenArray
from libs.engine.step.device_rows import DeviceRows, FeatureArray

# Rows of floats, here or on a device, or bfloat16 bits on their way to a drafter.
FeaturesT_co = TypeVar("FeaturesT_co", bound="np.ndarray[Any, Any] | DeviceRows", covariant=True)

# What a request to a head may ask for, of one sequence.
MAX_DRAFT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ContextRows(Generic[FeaturesT_co]):
    """Committed rows of one sequence: row i is (feature of position i, token at i + 1)."""

    seq_id: str
    start_position: int
    next_tokens: TokenArray  # [n >= 1]
    features: FeaturesT_co  # [n, width]

    @property
    def end_position(self) -> int:
        return self.start_position + len(self.next_tokens)

    @property
    def base_tokens(self) -> int:
        """Committed length once they are known."""
        return self.end_position + 1

    def last(self, n_rows: int) -> ContextRows[FeaturesT_co]:
        """The newest `n_rows` rows."""
        surplus = max(len(self.next_tokens) - n_rows, 0)
        tokens = self.next_tokens[surplus:]
        features: FeaturesT_co = self.features[surplus:]  # type: ignore[assignment]  # it keeps its dtype
        return ContextRows(self.seq_id, self.start_position + surplus, tokens, features)


HeadRows = ContextRows[FeatureArray]  # as a head computes with them


class DraftHead(Protocol):
    """Contexts of many sequences over one head. Synchronous; every call comes from one thread.

    A chain of EAGLE-3 and a block drafter have this one interface: they differ in how `propose_batch` gets
    its tokens.
    """

    @property
    def feature_width(self) -> int: ...

    @property
    def digest(self) -> str:
        """Hex digest of the head's files: the `drafter` part of the fingerprint."""
        ...

    @property
    def sequences(self) -> int:
        """Contexts held."""
        ...

    def extend_batch(self, rows: Sequence[HeadRows]) -> None:
        """Take rows in, in order. Raises InvalidArgument, before anything changes, when some do not fit."""
        ...

    def propose_batch(
        self, seq_ids: Sequence[str], n_drafts: int, *, min_confidence: float = 0.0
    ) -> dict[str, list[int]]:
        """Up to `n_drafts` next tokens of each; unknown sequences are left out.

        Drafts end where the head gives all of them together less than `min_confidence`.
        """
        ...

    def close(self, seq_id: str) -> None:
        """Drop the sequence's context. Idempotent."""
        ...

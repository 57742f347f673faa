"""Rows that a head keeps for its contexts. Without torch, so that memory is counted before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

PADDED_CONTEXTS = 64  # of one padded buffer, which bounds its memory
MAX_DRAFTS = 16  # drafts of one proposal
_ROWS_BEHIND = MAX_DRAFTS + 1  # a block drafter's block begins with the known token


def context_rows(window_tokens: int) -> int:
    """Rows of a context's buffers."""
    return 2 * window_tokens + _ROWS_BEHIND


@dataclass(frozen=True, slots=True)
class KvShape:
    """Widths of a row's keys and values. `values_in_keys`: values are the first part of the keys."""

    n_kv_heads: int
    key_width: int
    value_width: int
    values_in_keys: bool = False

    @property
    def row_values(self) -> int:
        """Numbers that a buffer holds for a row."""
        return self.n_kv_heads * (self.key_width + (0 if self.values_in_keys else self.value_width))

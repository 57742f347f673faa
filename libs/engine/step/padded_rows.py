"""How many rows of a sequence a step with drafts has room for. Few counts make few shapes. Pure."""

from __future__ import annotations


def padded_rows(n_rows: int) -> int:
    """The least of 1, 2, 3, 4, 6, 9, 13, ... that is `n_rows` at least; each is half as much again."""
    padded = 1
    while padded < n_rows:
        padded = max(padded + 1, padded * 3 // 2)
    return padded

"""Many token ids in pieces: half a million at once keep the interpreter's lock for 20 to 50 ms. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_PIECE = 1 << 15
# Ids of an array that become a list together: a list takes ten times the memory.
LISTED_TOGETHER = 16_384


def pieces(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """The ids in order."""
    for start in range(0, len(ids), _PIECE):
        yield ids[start : start + _PIECE]


def listed(ids: Sequence[int]) -> list[int]:
    """The ids of a message's field, whose items become objects here."""
    copied: list[int] = []
    for piece in pieces(ids):
        copied += piece
    return copied


def are_below(ids: Sequence[int], end: int) -> bool:
    """Whether all are from 0 to `end` - 1."""
    return all(0 <= min(piece) <= max(piece) < end for piece in pieces(ids))

"""Replaces sampled tokens after which an answer could not end within its limit of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libs.engine.sampling.verify import count_accepted
from libs.engine.step.step_model import BAD_TOKEN, SequenceRows


def settle_tokens(
    chosen: list[int], sequences: Sequence[SequenceRows], pick: Callable[[int, Sequence[int]], int]
) -> None:
    """Change the tokens `chosen` for the sampled rows of these sequences, in place.

    Only the row after the accepted drafts counts: drafts have been cut where an answer could not end.
    `pick` takes the number of a row and the tokens that it may have.
    """
    first = 0
    for sequence in sequences:
        if sequence.constraint is not None and sequence.n_sampled:
            drafts, rows = sequence.drafts, range(first, first + sequence.n_sampled)
            n_accepted, n_before = count_accepted(drafts, [chosen[row] for row in rows]), -1
            while n_accepted > n_before:  # another token may be the next draft
                row, n_before = rows[n_accepted], n_accepted
                if chosen[row] == BAD_TOKEN:
                    break
                others = sequence.constraint.settle(drafts[:n_accepted], chosen[row])
                chosen[row] = pick(row, sorted(others)) if others else chosen[row]
                n_accepted = count_accepted(drafts, [chosen[row] for row in rows])
        first += sequence.n_sampled

"""Which sampled tokens give way to others, so that an answer ends within its limit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, cast

from libs.engine.sampling.settled_tokens import settle_tokens
from libs.engine.step.constraint import TokenConstraint
from libs.engine.step.step_model import BAD_TOKEN, SequenceRows
from libs.engine.step.types import SamplingParams
from tests.engine.sampling.test_sampler import make_rows


class EvenTokens:
    """An answer that ends after no odd token."""

    def settle(self, drafts: Sequence[int], token: int) -> Collection[int]:
        return {token + 3, token + 1} if token % 2 else ()


def rows(*drafts: int, **fields: Any) -> SequenceRows:
    return replace(make_rows(SamplingParams(), drafts=drafts), **fields)


EVEN = cast(TokenConstraint, EvenTokens())


def test_the_row_after_the_accepted_drafts_gives_way() -> None:
    """A token in its place may be the next draft: then that of the row after it counts, too."""
    sequences = [rows(1, 1), rows(n_sampled=0, constraint=EVEN)]
    sequences += [rows(constraint=EVEN), rows(2, 4, 6, constraint=EVEN), rows(5, constraint=EVEN)]
    chosen = [1, 1, 1, 3, 2, 3, 6, 9, 8, 9]
    picked: list[int] = []

    def pick(row: int, tokens: Sequence[int]) -> int:
        picked.append(row)
        return tokens[0]

    settle_tokens(chosen, sequences, pick)
    assert chosen == [1, 1, 1, 4, 2, 4, 6, 10, 8, 9]
    assert picked == [3, 5, 7]


def test_a_row_without_a_token_stays_so() -> None:
    chosen = [BAD_TOKEN]
    settle_tokens(chosen, [rows(constraint=EVEN)], lambda row, tokens: tokens[0])
    assert chosen == [BAD_TOKEN]

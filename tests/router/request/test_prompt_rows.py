"""The rows of a prompt reach the client once and in order, however workers send them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.request.model_card import ModelCard
from services.router.request.prompt_rows import PromptRows
from slipstream.errors import Internal
from slipstream.v1 import common_pb2, router_pb2

PROMPT = np.arange(40, 60, dtype=np.uint32)


def piece(first: int, n_rows: int, *, top: int = 0, **changes: bytes) -> common_pb2.PromptLogprobs:
    positions = np.arange(first, first + n_rows)
    tops = np.arange(top)
    fields = {
        "logprobs": (-positions / 4).astype("<f4").tobytes(),
        "ranks": positions.astype("<u4").tobytes(),
        "top_ids": (positions[:, None] + tops).astype("<u4").tobytes(),
        "top_logprobs": (-positions[:, None] - tops / 2).astype("<f4").tobytes(),
    }
    return common_pb2.PromptLogprobs(first_position=first, **fields | changes)


def taken(rows: PromptRows) -> list[router_pb2.TextLogprob]:
    found: list[router_pb2.TextLogprob] = []
    while rows.is_waiting:
        found += rows.pop_event().delta.prompt_logprobs
    return found


@given(
    attempts=st.lists(st.lists(st.integers(1, 6), max_size=6), min_size=1, max_size=4),
    takes=st.lists(st.booleans(), min_size=1),
    top=st.integers(0, 3),
)
def test_each_row_comes_once_over_any_attempts(
    card: ModelCard, attempts: list[list[int]], takes: list[bool], top: int
) -> None:
    """The last attempt sends all rows; those before break off anywhere."""
    rows, found, number = PromptRows(PROMPT, card.tokenizer), list[router_pb2.TextLogprob](), 0
    for widths in (*attempts, [len(PROMPT)]):
        first = 1
        for width in widths:
            width = min(width, len(PROMPT) - first)
            if width < 1:
                break
            rows.add(piece(first, width, top=top))
            first += width
            number += 1
            if takes[number % len(takes)] and rows.is_waiting:
                found += rows.pop_event().delta.prompt_logprobs
    found += taken(rows)
    assert rows.is_complete
    assert [row.token_id for row in found] == PROMPT.tolist()
    assert [row.rank for row in found] == list(range(len(PROMPT)))
    assert [row.logprob for row in found] == [-position / 4 for position in range(len(PROMPT))]
    for position, row in enumerate(found[1:], 1):
        assert [item.token_id for item in row.top] == [position + i for i in range(top)]
        assert [item.rank for item in row.top] == list(range(1, top + 1))
        assert [item.logprob for item in row.top] == [-position - i / 2 for i in range(top)]


def test_a_restarted_request_goes_on_behind_the_rows_that_were_written(card: ModelCard) -> None:
    rows = PromptRows(PROMPT, card.tokenizer, taken=9)
    for first in range(1, len(PROMPT)):
        rows.add(piece(first, 1))
    assert [row.token_id for row in taken(rows)] == PROMPT[9:].tolist()


def test_a_prompt_of_one_token_is_complete(card: ModelCard) -> None:
    rows = PromptRows(PROMPT[:1], card.tokenizer)
    assert rows.is_complete
    (row,) = taken(rows)
    assert (row.token_id, row.rank) == (40, 0)


def test_an_event_has_a_bounded_number_of_log_probabilities(card: ModelCard) -> None:
    prompt = np.arange(1000, dtype=np.uint32) % 500
    rows = PromptRows(prompt, card.tokenizer)
    likely = np.zeros((999, 20), "<u4").tobytes()
    rows.add(piece(1, 999, top=20, top_ids=likely))
    sizes = []
    while rows.is_waiting:
        sizes.append(len(rows.pop_event().delta.prompt_logprobs))
    assert sum(sizes) == 1000
    assert max(sizes) == 256 // 21


@pytest.mark.parametrize(
    "bad",
    [
        piece(2, 3),
        piece(0, 3),
        piece(1, 20),
        piece(1, 3, ranks=b"1234"),
        piece(1, 3, top=2, top_logprobs=b"1234"),
        piece(1, 3, top_ids=b"1234", top_logprobs=b"1234"),
        piece(1, 3, logprobs=b"1234" * 3 + b"5"),
    ],
    ids=["gap", "first token", "beyond the prompt", "ranks", "top", "uneven top", "part of a number"],
)
def test_rows_that_do_not_fit_the_prompt_are_a_defect(
    card: ModelCard, bad: common_pb2.PromptLogprobs
) -> None:
    with pytest.raises(Internal, match="prompt rows"):
        PromptRows(PROMPT, card.tokenizer).add(bad)


def test_a_likely_token_beyond_the_tokenizer_has_no_text(card: ModelCard) -> None:
    """A model may have more rows than its tokenizer has ids."""
    rows = PromptRows(PROMPT, card.tokenizer)
    beyond = np.full((19, 1), card.tokenizer.vocab_size + 3, "<u4").tobytes()
    rows.add(piece(1, 19, top=1, top_ids=beyond))
    found = taken(rows)
    assert [row.token_id for row in found] == PROMPT.tolist()
    assert {(item.token_id - card.tokenizer.vocab_size, item.token_bytes) for item in found[5].top} == {
        (3, b"")
    }

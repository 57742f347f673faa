"""answer_batch: one answer for each extend, only the newest of a sequence proposed, bad rows left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.core.fake_head import FakeHead
from libs.engine.step.draft_head import MAX_DRAFT_TOKENS, ContextRows, HeadRows
from services.drafter.batcher import DraftWork, Proposal, answer_batch
from slipstream.errors import InvalidArgument


def rows(seq_id: str, start: int, last_token: int, n: int = 2) -> HeadRows:
    tokens = np.full(n, last_token, dtype="<u4")
    return ContextRows(seq_id, start, tokens, np.zeros((n, 8), dtype="<f4"))


def work(*items: HeadRows, closed: Sequence[str] = (), n_drafts: int = 3) -> DraftWork:
    return DraftWork(items, closed, [n_drafts] * len(items), answer=lambda _: None)


def head() -> FakeHead:
    return FakeHead(guess=lambda token: token + 1)


def test_batches_of_several_streams() -> None:
    answers = answer_batch(head(), [work(rows("0/a", 0, 5), rows("0/b", 3, 7)), work(rows("1/a", 0, 9))])
    assert answers == [
        [Proposal("0/a", 3, (6, 7, 8)), Proposal("0/b", 6, (8, 9, 10))],
        [Proposal("1/a", 3, (10, 11, 12))],
    ]


def test_only_the_newest_extend_is_worth_a_proposal() -> None:
    answers = answer_batch(head(), [work(rows("a", 0, 5)), work(rows("a", 2, 6))])
    assert answers == [[Proposal("a", 3, ())], [Proposal("a", 5, (7, 8, 9))]]


def test_extend_only_and_bounded_drafts() -> None:
    assert answer_batch(head(), [work(rows("a", 0, 5), n_drafts=0)]) == [[Proposal("a", 3, ())]]
    ((proposal,),) = answer_batch(head(), [work(rows("a", 0, 5), n_drafts=100)])
    assert len(proposal.tokens) == MAX_DRAFT_TOKENS


def test_closed_sequences_have_no_context() -> None:
    drafter = head()
    answer_batch(drafter, [work(rows("a", 0, 5), rows("b", 0, 5))])
    assert drafter.sequences == 2
    answer_batch(drafter, [work(closed=["a", "unknown"])])
    assert drafter.sequences == 1


class Picky(FakeHead):
    def extend_batch(self, rows: Sequence[HeadRows]) -> None:
        if any(13 in r.next_tokens for r in rows):
            raise InvalidArgument("next_tokens", "is unlucky")
        super().extend_batch(rows)


def test_rows_that_do_not_fit_spoil_no_others() -> None:
    drafter = Picky(guess=lambda token: token + 1)
    answers = answer_batch(drafter, [work(rows("a", 0, 5), rows("b", 0, 13))])
    assert answers == [[Proposal("a", 3, (6, 7, 8)), Proposal("b", 3, ())]]
    assert drafter.sequences == 1


_works = st.lists(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.integers(1, 20), st.integers(0, 4)),
        max_size=3,
    ),
    max_size=5,
)


@given(_works)
def test_every_extend_is_answered_once_in_order(works: list[list[tuple[str, int, int, int]]]) -> None:
    batch = [
        DraftWork(
            [rows(seq_id, start, token) for seq_id, start, token, _ in items],
            (),
            [n for *_, n in items],
            answer=lambda _: None,
        )
        for items in works
    ]
    answers = answer_batch(Picky(guess=lambda token: token + 1), batch)
    for item, answer in zip(batch, answers, strict=True):
        assert [(r.seq_id, r.base_tokens) for r in item.rows] == [(p.seq_id, p.base_tokens) for p in answer]
    newest = {r.seq_id: r for item in batch for r in item.rows if 13 not in r.next_tokens}
    for item, answer in zip(batch, answers, strict=True):
        for r, n, proposal in zip(item.rows, item.draft_tokens, answer, strict=True):
            if newest.get(r.seq_id) is r:
                first = int(r.next_tokens[-1]) + 1
                assert len(proposal.tokens) in (0, n)
                assert list(proposal.tokens) == list(range(first, first + len(proposal.tokens)))
            else:
                assert not proposal.tokens

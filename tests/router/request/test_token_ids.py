"""Token ids in pieces are the same ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.request import token_ids
from services.router.request.token_ids import are_below, listed


@given(ids=st.lists(st.integers(-2, 9), max_size=30), piece=st.integers(1, 8), end=st.integers(0, 9))
def test_pieces_of_any_length_are_checked_and_copied(ids: list[int], piece: int, end: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_ids, "_PIECE", piece)
        assert are_below(ids, end) == all(0 <= each < end for each in ids)
        assert listed(tuple(ids)) == ids

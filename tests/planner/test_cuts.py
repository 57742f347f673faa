"""Properties of cuts and stages."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.planner.cards import parse_cards
from libs.planner.cuts import Cut, cut_stages, enumerate_cuts
from libs.planner.fit import fit_cut
from slipstream.errors import InvalidArgument
from tests.planner.shapes import kimi, small_model

_KIMI = kimi()
_SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=9)


@given(_SIZES, st.integers(0, 60), st.integers(0, 60), st.data())
def test_stages_keep_all_layers_and_no_division_has_a_smaller_largest_stage(
    sizes: list[int], first: int, last: int, data: st.DataObject
) -> None:
    model = small_model(sizes, first_bytes=first, last_bytes=last)
    n_stages = data.draw(st.integers(1, len(sizes)))
    stages = cut_stages(model, n_stages)
    assert [layer for stage in stages for layer in stage.layers] == list(model.layers)
    assert all(stage.layers for stage in stages)
    assert stages[0].embedding_bytes == first and stages[-1].head_bytes == last
    largest = max(stage.card_bytes(Cut(1, n_stages)) for stage in stages)
    assert largest == _smallest_largest(sizes, first, last, n_stages)


def _smallest_largest(sizes: list[int], first: int, last: int, n_stages: int) -> int:
    weights = [first + sizes[0], *sizes[1:]]
    weights[-1] += last
    divisions = combinations(range(1, len(sizes)), n_stages - 1)
    return min(
        max(sum(weights[begin:end]) for begin, end in zip((0, *ends), (*ends, len(sizes)), strict=True))
        for ends in divisions
    )


@pytest.mark.parametrize("n_cards", [1, 2, 3, 6, 8, 16])
def test_cuts_use_all_cards_once(n_cards: int) -> None:
    cuts = list(enumerate_cuts(kimi(), n_cards))
    assert len(set(cuts)) == len(cuts)
    assert all(cut.n_cards == n_cards for cut in cuts)
    assert len({cut.name for cut in cuts}) == len(cuts)


@given(st.integers(0, 8 * 2**30), st.integers(1, 2**30))
def test_more_overhead_never_leaves_more_tokens(overhead_bytes: int, more_bytes: int) -> None:
    model, card = _KIMI, parse_cards("8xh100")[1]
    for cut in (Cut(8), Cut(2, 4), Cut(8, kv=8)):
        less = fit_cut(model, cut, card, overhead_bytes=overhead_bytes + more_bytes)
        assert less.kv_tokens <= fit_cut(model, cut, card, overhead_bytes=overhead_bytes).kv_tokens


@pytest.mark.parametrize(
    "text", ["", "8", "h100", "0xh100", "65xh100", "8xh100-40", "8 x h100", "xh100", "8xtpu"]
)
def test_bad_cards_are_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--gpus"):
        parse_cards(text)


def test_cards_by_short_name() -> None:
    assert parse_cards("8xH100") == parse_cards(" 8xh100-80 ")

"""Properties of cuts and stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.model_spec.config import load_config
from libs.engine.parallel.sizes import ParallelSizes, check_sizes
from libs.planner.cards import parse_cards
from libs.planner.cuts import Cut, cut_stages, enumerate_cuts
from libs.planner.fit import CardMemory, fit_memory
from libs.planner.kv_cache import cut_of
from slipstream.errors import InvalidArgument
from tests.planner.shapes import KIMI_CONFIG, kimi, small_model

_KIMI, _CONFIG = kimi(), load_config(KIMI_CONFIG)
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


@pytest.mark.parametrize("n_cards", [1, 2, 6, 8, 16])
def test_every_even_form_of_parallel_is_a_cut(n_cards: int) -> None:
    """Mixes too: tp=2,dp=4,ep=8. K2.5 has 64 heads and 384 experts, a page 64 tokens."""
    sides = [side for side in range(1, n_cards + 1) if n_cards % side == 0]
    wanted = {
        ParallelSizes(tp, pp, ep, dp, kv)
        for tp, pp, ep, dp, kv in product(sides, repeat=5)
        if tp * kv * dp * pp == n_cards and not (tp * kv * dp) % ep
        if not 64 % tp and not 64 % kv and not 384 % ep
    }
    assert ParallelSizes(tp=2, dp=4, ep=8) in wanted or n_cards != 8
    workers = [cut for cut in enumerate_cuts(_KIMI, n_cards) if cut.replicas == 1]
    assert {cut.sizes for cut in workers} == wanted
    assert all(cut_of(cut.sizes) == cut for cut in workers)
    for sizes in wanted:
        check_sizes(sizes, _CONFIG)


@pytest.mark.parametrize("n_cards", [2, 8, 16])
def test_replicas_are_the_cuts_over_fewer_cards(n_cards: int) -> None:
    for cut in enumerate_cuts(_KIMI, n_cards):
        assert replace(cut, replicas=1) in set(enumerate_cuts(_KIMI, n_cards // cut.replicas))
    counts = {cut.replicas for cut in enumerate_cuts(_KIMI, n_cards)}
    assert counts == {number for number in range(1, n_cards + 1) if n_cards % number == 0}


@given(st.integers(0, 8 * 2**30), st.integers(1, 2**30))
def test_more_overhead_never_leaves_more_tokens(overhead_bytes: int, more_bytes: int) -> None:
    model, card = _KIMI, parse_cards("8xh100")[1]
    for cut in (Cut(8), Cut(2, 4), Cut(8, kv=8)):
        memory = CardMemory(card.visible_bytes, overhead_bytes)
        less = fit_memory(model, cut, replace(memory, overhead_bytes=overhead_bytes + more_bytes))
        assert less.kv_tokens <= fit_memory(model, cut, memory).kv_tokens


@pytest.mark.parametrize(
    "text", ["", "8", "h100", "0xh100", "65xh100", "8xh100-40", "8 x h100", "xh100", "8xtpu"]
)
def test_bad_cards_are_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--gpus"):
        parse_cards(text)


def test_cards_by_short_name() -> None:
    assert parse_cards("8xH100") == parse_cards(" 8xh100-80 ")

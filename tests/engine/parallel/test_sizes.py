"""How a group is described, and which place each rank has."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.model_spec.config import parse_config
from libs.engine.parallel.sizes import (
    ParallelSizes,
    RankPlace,
    check_kv_split,
    check_sizes,
    even_slice,
    parse_sizes,
)
from slipstream.errors import InvalidArgument
from tests.support.random_checkpoint import TINY_CONFIG


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("tp=2,pp=2", ParallelSizes(tp=2, pp=2)),
        (" dp=4 , ep=2", ParallelSizes(dp=4, ep=2)),
        ("", ParallelSizes()),
        ("tp=4,dp=2,ep=8,pp=3", ParallelSizes(4, 3, 8, 2)),
        ("tp=2,kv=4,ep=8", ParallelSizes(tp=2, kv=4, ep=8)),
    ],
)
def test_parses(text: str, sizes: ParallelSizes) -> None:
    assert parse_sizes(text) == sizes
    assert parse_sizes(str(sizes)) == sizes


@pytest.mark.parametrize(
    "text",
    [
        "tp",
        "tp=",
        "tp=0",
        "tp=-1",
        "tp=2,tp=2",
        "xp=2",
        "ep=2",
        "tp=2,ep=4",
        "tp=65",
        "tp=99999",
        "tp=²",
        "kv=0",
    ],
)
def test_refuses_by_the_fields_name(text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_sizes(text, "--decode-parallel")
    assert refused.value.field == "--decode-parallel"


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        (ParallelSizes(tp=3), "heads"),
        (ParallelSizes(pp=5), "layers"),
        (ParallelSizes(dp=16, ep=16), "experts"),
        (ParallelSizes(dp=64), "moe_intermediate_size"),
    ],
)
def test_refuses_cuts_that_the_model_does_not_allow(sizes: ParallelSizes, word: str) -> None:
    config = parse_config(TINY_CONFIG)
    with pytest.raises(InvalidArgument, match=word):
        check_sizes(sizes, config)
    check_sizes(ParallelSizes(tp=4, pp=4, ep=2, dp=2), replace(config, moe_intermediate_size=64))


def test_refuses_a_split_of_kv_that_pages_or_kernels_do_not_allow() -> None:
    check_kv_split(ParallelSizes(kv=4), 64, "native")
    check_kv_split(ParallelSizes(tp=2), 63, "triton")
    with pytest.raises(InvalidArgument, match="kv=3 does not divide the 64 tokens"):
        check_kv_split(ParallelSizes(kv=3), 64, "native")
    with pytest.raises(InvalidArgument, match="triton kernels"):
        check_kv_split(ParallelSizes(kv=2), 64, "triton")


@pytest.mark.parametrize(("tp", "pp", "dp", "kv"), list(product((1, 2, 3), (1, 2), (1, 2, 3), (1, 2, 4))))
def test_every_rank_has_its_own_place(tp: int, pp: int, dp: int, kv: int) -> None:
    stage_ranks = tp * dp * kv
    for ep in (n for n in range(1, stage_ranks + 1) if stage_ranks % n == 0):
        sizes = ParallelSizes(tp, pp, ep, dp, kv)
        places = [RankPlace(rank, sizes) for rank in range(sizes.n_ranks)]
        assert len({(p.stage, p.data_part, p.head_part, p.kv_part) for p in places}) == sizes.n_ranks
        assert len({(p.stage, p.expert_part, p.inner_part) for p in places}) == sizes.n_ranks
        assert places[0].is_last_stage
        for place in places:
            assert place.stage_members()[place.index] == place.rank
            assert place.kv_members()[place.kv_part] == place.rank
            others = [places[rank] for rank in place.kv_members()]
            assert {(p.stage, p.data_part, p.head_part) for p in others} == {
                (place.stage, place.data_part, place.head_part)
            }
            if not place.is_last_stage:
                after = places[place.next_rank]
                assert (after.stage, after.index) == (place.stage + 1, place.index)
                assert after.previous_rank == place.rank


@given(total=st.integers(1, 500), parts=st.integers(1, 16), unit=st.integers(1, 64))
def test_even_slices_cover_everything_once(total: int, parts: int, unit: int) -> None:
    spans = [even_slice(total, part, parts, unit=unit) for part in range(parts)]
    assert [spans[0].start, *(s.stop for s in spans)] == [*(s.start for s in spans), total]
    if total >= parts:
        assert all(span.stop > span.start for span in spans)
    if total // unit >= parts:
        assert all(span.start % unit == 0 for span in spans)

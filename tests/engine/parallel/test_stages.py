"""The balance of pipeline stages against every possible cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.parallel.stages import PartCost, balance_stages

COSTS = st.builds(PartCost, st.integers(0, 50).map(float), st.integers(0, 50).map(float))
NOTHING = PartCost(0.0, 0.0)


@given(layers=st.lists(COSTS, min_size=1, max_size=8), embedding=COSTS, head=COSTS, data=st.data())
def test_no_other_cut_has_a_cheaper_largest_stage(
    layers: list[PartCost], embedding: PartCost, head: PartCost, data: st.DataObject
) -> None:
    n_stages = data.draw(st.integers(1, len(layers)))
    stages = balance_stages(layers, n_stages, embedding=embedding, head=head)
    assert [i for stage in stages for i in stage] == list(range(len(layers)))
    assert len(stages) == n_stages and all(len(stage) for stage in stages)
    possible = [
        [range(*edge) for edge in pairwise((0, *inner, len(layers)))]
        for inner in combinations(range(1, len(layers)), n_stages - 1)
    ]
    least = min(_largest(layers, cut, embedding, head) for cut in possible)
    assert _largest(layers, stages, embedding, head) == pytest.approx(least)


def _largest(
    layers: Sequence[PartCost], stages: Sequence[range], embedding: PartCost, head: PartCost
) -> float:
    """The largest share of bytes or time of any stage, counted part by part."""
    parts = [[layers[i] for i in stage] for stage in stages]
    parts[0] = [*parts[0], embedding]
    parts[-1] = [*parts[-1], head]
    shares = []
    for kind in ("n_bytes", "time"):
        of_stage: list[float] = [sum(getattr(part, kind) for part in stage) for stage in parts]
        shares += [total / (sum(of_stage) or 1.0) for total in of_stage]
    return max(shares)


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    layers = [PartCost(1.0, 1.0)] * 8
    assert balance_stages(layers, 2, embedding=NOTHING, head=NOTHING) == (range(4), range(4, 8))
    heavy = balance_stages(layers, 2, embedding=NOTHING, head=PartCost(2.0, 2.0))
    assert heavy == (range(5), range(5, 8))


def test_time_counts_as_much_as_bytes() -> None:
    layers = [PartCost(1.0, 6.0), PartCost(1.0, 1.0), PartCost(1.0, 1.0), PartCost(1.0, 1.0)]
    assert balance_stages(layers, 2, embedding=NOTHING, head=NOTHING) == (range(1), range(1, 4))


def test_refuses_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="3 stages"):
        balance_stages([NOTHING, NOTHING], 3, embedding=NOTHING, head=NOTHING)

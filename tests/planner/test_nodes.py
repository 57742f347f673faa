"""Cards of several nodes: where cuts cross their edges, and what that costs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.planner.cards import parse_cards
from libs.planner.cuts import Cut, cut_stages, enumerate_cuts
from libs.planner.exchanges import FAR_EXCHANGE_S, FAR_HOP_S, GATHERED, HOP_S, hops_s, sum_s
from libs.planner.nodes import far_adapters, far_hops, worker_nodes
from libs.planner.plan import capacity_at, make_plan
from libs.planner.times import StepTimes
from libs.planner.traffic import Traffic
from tests.planner.shapes import kimi

_MODEL, (_, _CARD) = kimi(), parse_cards("16xh200")
_CUTS = [cut for n in (1, 4, 6, 8, 12, 16, 24) for cut in enumerate_cuts(_MODEL, n)]


def _node(card: int) -> int:
    return card // 8


@given(st.sampled_from(_CUTS))
def test_edges_of_nodes_are_where_cards_of_a_cut_lie_on_both_sides(cut: Cut) -> None:
    stages = [range(begin, begin + cut.tp) for begin in range(0, cut.n_cards, cut.tp)]
    crossing = [stage for stage in stages if len({_node(card) for card in stage}) > 1]
    fewest = [min(_on(stage, _node(stage[0])), _on(stage, _node(stage[-1]))) for stage in crossing]
    assert far_adapters(cut.n_cards, cut.tp) == min(fewest, default=0)
    workers = [stages[begin : begin + cut.pp] for begin in range(0, len(stages), cut.pp)]
    hops = [
        sum(any(_node(a) != _node(b) for a, b in zip(*pair, strict=True)) for pair in pairwise(each))
        for each in workers
    ]
    assert far_hops(cut) == max(hops)
    assert worker_nodes(cut) == max(
        len({_node(card) for stage in each for card in stage}) for each in workers
    )


def _on(cards: range, node: int) -> int:
    return sum(_node(card) == node for card in cards)


@given(st.integers(1, 8192))
def test_sums_and_hops_between_nodes_are_slower(n_rows: int) -> None:
    near, far = Cut(8, 2), Cut(16)
    assert sum_s(_MODEL, Cut(1, 16), _CARD, n_rows, GATHERED) == 0.0
    assert sum_s(_MODEL, far, _CARD, n_rows, GATHERED) - FAR_EXCHANGE_S >= (
        GATHERED.card_bytes(n_rows * _MODEL.hidden_size, 16) / (8 * _CARD.network_bytes_per_s) * 0.999
    )
    assert sum_s(_MODEL, far, _CARD, n_rows, GATHERED) < 1.001 * FAR_EXCHANGE_S + (
        GATHERED.card_bytes(n_rows * _MODEL.hidden_size, 16) / (8 * _CARD.network_bytes_per_s) * 1.001
    )
    assert sum_s(_MODEL, far, _CARD, n_rows, GATHERED) > sum_s(_MODEL, near, _CARD, n_rows, GATHERED)
    n_bytes = 4 * n_rows * _MODEL.hidden_size
    near_s, far_s = HOP_S + n_bytes / _CARD.link_bytes_per_s, FAR_HOP_S + n_bytes / _CARD.network_bytes_per_s
    for cut, hops in ((Cut(4, 2), near_s), (near, far_s), (Cut(4, 4), 2 * near_s + far_s)):
        assert hops_s(_MODEL, cut, _CARD, n_rows) == pytest.approx(hops)


def test_replicas_serve_as_much_as_their_workers() -> None:
    traffic, stages = Traffic(), cut_stages(_MODEL, 1)
    one, two = (
        capacity_at(StepTimes(_MODEL, cut, stages, _CARD), traffic, 20, "")
        for cut in (Cut(8, kv=4), Cut(8, kv=4, replicas=2))
    )
    assert (two.n_sequences, two.token_s) == (40, one.token_s)
    assert two.requests_per_s == pytest.approx(2 * one.requests_per_s)


def test_sixteen_h200_are_two_workers_of_a_node_each() -> None:
    plan = make_plan(_MODEL, *parse_cards("16xh200"))
    half = make_plan(_MODEL, *parse_cards("8xh200"))
    cut, capacity = plan.chosen.fit.cut, plan.chosen.capacity
    assert (cut.replicas, worker_nodes(cut)) == (2, 1)
    assert half.chosen.capacity is not None and capacity is not None
    assert capacity.requests_per_s == pytest.approx(2 * half.chosen.capacity.requests_per_s)
    assert plan.worker_arguments() == half.worker_arguments()
    assert not any("on one machine" in each.reason for each in plan.worker_refusals())


def test_a_worker_over_two_nodes_is_refused_by_that_name() -> None:
    """With so much overhead the weights need the cards of both nodes."""
    plan = make_plan(_MODEL, *parse_cards("16xh100"), overhead_bytes=30 * 2**30)
    assert worker_nodes(plan.chosen.fit.cut) == 2
    assert any("on one machine, not on 2" in each.reason for each in plan.worker_refusals())

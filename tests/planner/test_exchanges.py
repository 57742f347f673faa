"""What the planner charges for a sum is what a rank of the engine receives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.parallel.links import GroupLinks
from libs.engine.parallel.sizes import ParallelSizes, RankPlace
from libs.planner.cards import parse_cards
from libs.planner.cuts import Cut
from libs.planner.exchanges import ALL_REDUCED, EXCHANGE_S, GATHERED, share_s, sum_s
from tests.planner.shapes import kimi

_MODEL, (_, _CARD) = kimi(), parse_cards("8xh200")


class _Links(GroupLinks):
    """Links of rank 0 without connections. `received`: bytes of other ranks' tensors."""

    def __init__(self, sizes: ParallelSizes) -> None:
        self.place = RankPlace(0, sizes)
        self._stage = self._kv = None
        self.received = 0

    def gather(self, parts: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        for part in parts:
            part.copy_(own)
        self.received += sum(part.nbytes for part in parts) - own.nbytes


@pytest.mark.parametrize("sizes", [ParallelSizes(tp=2), ParallelSizes(tp=2, kv=4), ParallelSizes(dp=4)])
def test_charged_bytes_are_those_that_a_rank_gathers(
    sizes: ParallelSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, cut = _Links(sizes), Cut(sizes.stage_ranks, kv=sizes.kv, dp=sizes.dp)
    monkeypatch.setattr(dist, "all_gather", links.gather)
    links.sum_in_stage(torch.zeros(3, _MODEL.hidden_size))
    charged_s = sum_s(_MODEL, cut, _CARD, 3, GATHERED) - EXCHANGE_S
    assert charged_s * _CARD.link_bytes_per_s == pytest.approx(links.received)
    if sizes.kv > 1:
        links.received = 0
        links.gather_shares(torch.zeros(3, _MODEL.attention_width // sizes.tp))
        charged_s = share_s(_MODEL, cut, _CARD, 3) - EXCHANGE_S
        assert charged_s * _CARD.link_bytes_per_s == pytest.approx(links.received)


@given(st.integers(2, 64), st.integers(1, 1 << 20))
def test_gathers_cost_as_many_parts_as_there_are_other_cards(n_cards: int, n_values: int) -> None:
    gathered = GATHERED.card_bytes(n_values, n_cards)
    assert gathered == 4 * n_values * (n_cards - 1)
    assert gathered == pytest.approx(ALL_REDUCED.card_bytes(n_values, n_cards) * n_cards)

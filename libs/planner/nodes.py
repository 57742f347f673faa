"""Where the cards of a cut lie: node after node, worker after worker, stage after stage. Pure."""

from __future__ import annotations

from functools import cache

from libs.planner.cards import NODE_CARDS
from libs.planner.cuts import Cut


@cache
def far_adapters(n_cards: int, size: int) -> int:
    """The fewest adapters between nodes that any group of `size` consecutive cards has.

    0: no group lies on two nodes.
    """
    fewest = 0
    for begin in range(0, n_cards, size):
        end = begin + size
        if begin // NODE_CARDS != (end - 1) // NODE_CARDS:
            ends = (NODE_CARDS - begin % NODE_CARDS, end % NODE_CARDS or NODE_CARDS)
            fewest = min(fewest or NODE_CARDS, *ends)
    return fewest


@cache
def far_hops(cut: Cut) -> int:
    """Between how many stages of a worker rows pass from node to node; of the worker with the most."""

    def is_far(begin: int) -> bool:
        return any(
            card // NODE_CARDS != (card + cut.tp) // NODE_CARDS for card in range(begin, begin + cut.tp)
        )

    return max(
        sum(is_far(worker + stage * cut.tp) for stage in range(cut.pp - 1))
        for worker in range(0, cut.n_cards, cut.group_cards)
    )


def worker_nodes(cut: Cut) -> int:
    """On how many nodes one worker lies; of the worker with the most."""
    workers = range(0, cut.n_cards, cut.group_cards)
    return max((begin + cut.group_cards - 1) // NODE_CARDS - begin // NODE_CARDS + 1 for begin in workers)

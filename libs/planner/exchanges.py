"""Times of what the cards of a cut send to each other in a step."""

from __future__ import annotations

from dataclasses import dataclass

from libs.planner.cards import Card
from libs.planner.cuts import Cut
from libs.planner.nodes import far_adapters, far_hops
from libs.planner.shapes.model_shape import ModelShape

# An exchange between cards of a node; the way to the next stage.
EXCHANGE_S = 10e-6
HOP_S = 20e-6
# The same between nodes. No figure is published for these sizes: an assumption, three times as long.
FAR_EXCHANGE_S = 30e-6
FAR_HOP_S = 60e-6
_VALUE_BYTES = 4  # the residual stream and all parts of it are fp32


@dataclass(frozen=True, slots=True)
class SumForm:
    """How the cards of a stage join their parts of the residual stream."""

    value_bytes: int
    is_reduced: bool

    def card_bytes(self, n_values: float, n_cards: int) -> float:
        """What one card receives: the whole parts of all others, or twice its slice of each."""
        slices = 2 / n_cards if self.is_reduced else 1
        return (n_cards - 1) * slices * n_values * self.value_bytes


# `GroupLinks.sum_in_stage`: so a row has the same bits beside any other rows (ADR 0056).
GATHERED = SumForm(_VALUE_BYTES, is_reduced=False)
# The sum of the published engines, by which the efficiency is fitted.
ALL_REDUCED = SumForm(2, is_reduced=True)


def sum_s(model: ModelShape, cut: Cut, card: Card, n_rows: float, form: SumForm) -> float:
    """One sum over the cards of a stage."""
    if cut.tp == 1:
        return 0.0
    return _exchange_s(form.card_bytes(n_rows * model.hidden_size, cut.tp), cut, cut.tp, card)


def share_s(model: ModelShape, cut: Cut, card: Card, n_rows: float) -> float:
    """The merge of a KV split in one layer: a card gathers the attention of the same heads."""
    if cut.kv == 1:
        return 0.0
    values = n_rows * model.attention_width * cut.kv / cut.attention_cards
    return _exchange_s(GATHERED.card_bytes(values, cut.kv), cut, cut.attention_cards, card)


def hops_s(model: ModelShape, cut: Cut, card: Card, n_rows: float) -> float:
    """The way of the rows of a micro-batch through all stages."""
    n_bytes, n_far = n_rows * model.hidden_size * _VALUE_BYTES, far_hops(cut)
    near_s, far_s = HOP_S + n_bytes / card.link_bytes_per_s, FAR_HOP_S + n_bytes / card.network_bytes_per_s
    return (cut.pp - 1 - n_far) * near_s + n_far * far_s


def _exchange_s(card_bytes: float, cut: Cut, n_cards: int, card: Card) -> float:
    """An exchange of `n_cards` cards, of which each receives `card_bytes`.

    Between nodes the adapters of a group's cards on one node share what passes its edge.
    """
    adapters = far_adapters(cut.n_cards, n_cards)
    if not adapters:
        return EXCHANGE_S + card_bytes / card.link_bytes_per_s
    return FAR_EXCHANGE_S + card_bytes / min(card.link_bytes_per_s, adapters * card.network_bytes_per_s)

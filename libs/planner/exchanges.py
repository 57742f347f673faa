"""Times of what the cards of a cut send to each other in a step."""

from __future__ import annotations

from dataclasses import dataclass

from libs.planner.cards import Card
from libs.planner.cuts import Cut
from libs.planner.model_shape import ModelShape

# An exchange between cards of a node; the way to the next stage.
EXCHANGE_S = 10e-6
HOP_S = 20e-6
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
    return EXCHANGE_S + form.card_bytes(n_rows * model.hidden_size, cut.tp) / card.link_bytes_per_s


def share_s(model: ModelShape, cut: Cut, card: Card, n_rows: float) -> float:
    """The merge of a KV split in one layer: a card gathers the attention of the same heads."""
    if cut.kv == 1:
        return 0.0
    values = n_rows * model.attention_width * cut.kv / cut.attention_cards
    return EXCHANGE_S + GATHERED.card_bytes(values, cut.kv) / card.link_bytes_per_s


def hop_s(model: ModelShape, cut: Cut, card: Card, n_rows: float) -> float:
    """The way of the rows of a micro-batch to the next stage."""
    return HOP_S + n_rows * model.hidden_size * _VALUE_BYTES / card.link_bytes_per_s

"""Whether a cut fits the fullest card, and how many distinct context tokens the rest of the memory holds."""

from __future__ import annotations

from dataclasses import dataclass

from libs.planner.cards import Card
from libs.planner.cuts import Cut, Stage, cut_stages
from libs.planner.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory of a cut. All bytes are of one card or of the node, as they say.

    card_weights_bytes  of the fullest card
    card_free_bytes     of the fullest card after weights and overhead; negative: what is missing
    node_free_bytes     of all cards together
    kv_tokens           distinct context tokens that the node can hold, in the layers that keep all of them
    kv_bytes            their bytes, stored once
    """

    cut: Cut
    stages: tuple[Stage, ...]
    card_weights_bytes: int
    card_free_bytes: int
    node_free_bytes: int
    kv_tokens: int
    kv_bytes: int

    @property
    def fits(self) -> bool:
        return self.card_free_bytes >= 0


def fit_cut(
    model: ModelShape, cut: Cut, card: Card, *, overhead_bytes: int, window_sequences: int = 1
) -> Fit:
    """`overhead_bytes`: what context, communication, graphs and activations take of each card.

    window_sequences: sequences whose windows are kept, in models with such layers.
    """
    stages = cut_stages(model, cut.pp)
    weights = [stage.card_bytes(cut) for stage in stages]
    free = [card.visible_bytes - overhead_bytes - size for size in weights]
    tokens = min(
        _stage_tokens(stage, cut, model, room, window_sequences)
        for stage, room in zip(stages, free, strict=True)
    )
    return Fit(
        cut=cut,
        stages=stages,
        card_weights_bytes=max(weights),
        card_free_bytes=min(free),
        node_free_bytes=sum(free) * cut.tp,
        kv_tokens=tokens,
        kv_bytes=tokens * model.kv_token_bytes,
    )


def kv_shares(model: ModelShape, cut: Cut) -> int:
    """Over how many cards of a group the KV of a sequence, or of the sequences, is divided."""
    if cut.is_attention_copied:
        return cut.tp
    return cut.kv * min(cut.tp // cut.kv, model.kv_heads)


def _stage_tokens(stage: Stage, cut: Cut, model: ModelShape, room: int, window_sequences: int) -> int:
    shares = kv_shares(model, cut)
    room -= window_sequences * stage.kv_window_bytes // min(cut.tp, model.kv_heads)
    if room <= 0:
        return 0
    if not stage.kv_token_bytes:
        return model.max_context_tokens
    return room * shares // stage.kv_token_bytes

"""Times of decode steps and prefills: bytes over bandwidth, FLOPs over the matrix units, and latencies."""

from __future__ import annotations

from dataclasses import dataclass

from libs.planner.cards import Card
from libs.planner.cuts import Cut, Stage
from libs.planner.fit import kv_shares
from libs.planner.model_shape import LayerShape, ModelShape

# The share of the ceilings that whole engines reach: the one fitted number, by the published curve of
# Kimi-K2.5 on 8 x H200 (docs/planner.md has its points and the errors).
EFFICIENCY = 0.46
# A dozen kernels a layer at 3 us a launch; an exchange between cards of a node; the way to the next stage.
LAYER_OVERHEAD_S = 36e-6
EXCHANGE_S = 10e-6
HOP_S = 20e-6
_BF16 = 2


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Predicts times of `cut` with its `stages` on `card`."""

    model: ModelShape
    cut: Cut
    stages: tuple[Stage, ...]
    card: Card
    efficiency: float = EFFICIENCY

    def decode_step_s(self, n_sequences: int, context_tokens: float, rows: int = 1) -> float:
        """Seconds from a token of a sequence to its next one. `rows`: tokens verified a sequence and step.

        With several stages, as many groups of sequences are on their way as there are stages.
        """
        group = max(n_sequences / self.cut.pp, 1.0)
        stages = sum(self._stage_s(stage, group, context_tokens, rows) for stage in self.stages)
        return stages + (self.cut.pp - 1) * HOP_S

    def prefill_s(self, n_tokens: float, cached_tokens: float = 0.0) -> float:
        """Seconds of the node for the prompt's `n_tokens` that are computed after `cached_tokens`.

        With several stages chunks follow one another: the slowest stage decides.
        """
        return max(self._prefill_stage_s(stage, n_tokens, cached_tokens) for stage in self.stages)

    def _stage_s(self, stage: Stage, group: float, context_tokens: float, rows: int) -> float:
        tokens = group * rows
        spread = self.cut.tp
        own = max(group / self.cut.dp, 1.0) if self.cut.is_attention_copied else group
        read, flops = 0.0, 0.0
        for layer, count in stage.counted_layers:
            read += count * self._attention_bytes(layer, own, context_tokens)
            read += count * (layer.shared_bytes + layer.expert_hits(tokens) * layer.expert_bytes) / spread
            flops += count * 2 * self._multiplied(layer) * tokens / spread
            flops += count * layer.context_flops * own * rows * context_tokens / self.cut.attention_cards
        read += stage.head_bytes / spread
        flops += 2 * stage.head_params * tokens / spread
        slowest = max(read / self.card.copy_bytes_per_s, flops / self.card.bf16_flops)
        return slowest / self.efficiency + len(stage.layers) * (
            LAYER_OVERHEAD_S + self._exchanges() * EXCHANGE_S
        )

    def _exchanges(self) -> int:
        """Exchanges of a layer: the sums behind attention and experts, the merge of a KV split."""
        return 0 if self.cut.tp == 1 else 2 + (self.cut.kv > 1) + self.cut.exchanges_queries

    def _multiplied(self, layer: LayerShape) -> int:
        """Weights that a token is multiplied with on all cards, copies included."""
        return layer.active_params + (self.cut.heads_copies - 1) * layer.heads_params

    def _attention_bytes(self, layer: LayerShape, own: float, context_tokens: float) -> float:
        """Weights and KV that one card reads."""
        kv = own * (layer.kv_token_bytes * context_tokens + layer.kv_window_bytes)
        weights = layer.attention_bytes + (self.cut.heads_copies - 1) * layer.heads_bytes
        return weights / self.cut.attention_cards + kv * self.cut.dp / kv_shares(self.model, self.cut)

    def _prefill_stage_s(self, stage: Stage, n_tokens: float, cached_tokens: float) -> float:
        pairs = n_tokens * (cached_tokens + n_tokens / 2)
        flops = sum(
            count * (2 * self._multiplied(layer) * n_tokens + layer.prefill_flops * pairs)
            for layer, count in stage.counted_layers
        )
        compute = flops / (self.card.bf16_flops * self.cut.tp * self.efficiency)
        if self.cut.tp == 1:
            return compute
        exchanged = self._exchanges() * len(stage.layers) * n_tokens * self.model.hidden_size * _BF16
        return compute + 2 * exchanged / (self.card.link_bytes_per_s * self.cut.tp)

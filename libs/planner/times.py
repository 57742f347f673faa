"""Times of decode steps and prefills: bytes over bandwidth, FLOPs over the matrix units, and latencies.

A step runs as the engine runs it: in micro-batches through the stages, one step after another.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.engine.parallel.split import count_micro_batches
from libs.planner.cards import Card
from libs.planner.cuts import Cut, Stage
from libs.planner.exchanges import GATHERED, SumForm, hops_s, share_s, sum_s
from libs.planner.fit import kv_shares
from libs.planner.shapes.model_shape import LayerShape, ModelShape

# The share of the ceilings that whole engines reach. It is the one fitted number, by the published curve of
# Kimi-K2.5 on 8 x H200 (docs/planner.md has its points and the errors).
EFFICIENCY = 0.48
# A dozen kernels a layer at 3 us a launch.
LAYER_OVERHEAD_S = 36e-6
# Rows of a step that prefills. Reading the weights then takes as long as computing the rows. The gathered
# parts take 0.5 GB on each of 8 cards.
STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one step or micro-batch: `each` of every sequence, which attend to `context_tokens`."""

    n_sequences: float
    each: float
    context_tokens: float
    is_prefill: bool = False

    @property
    def n_rows(self) -> float:
        return self.n_sequences * self.each

    def part(self, n_parts: int) -> Rows:
        """The rows of one of `n_parts` micro-batches, and the contexts of its sequences alone."""
        n_sequences = max(self.n_sequences / n_parts, 1.0)
        each = self.n_rows / n_parts / n_sequences
        return Rows(n_sequences, each, self.context_tokens, self.is_prefill)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Predicts times of `cut` with its `stages` on `card`. `sums`: how cards join their parts."""

    model: ModelShape
    cut: Cut
    stages: tuple[Stage, ...]
    card: Card
    sums: SumForm = GATHERED
    step_tokens: int = STEP_TOKENS

    def decode_step_s(self, n_sequences: int, context_tokens: float, rows: int = 1) -> float:
        """Seconds from a token of a sequence to its next one. `rows`: tokens verified a sequence and step."""
        return self._step_s(Rows(n_sequences, rows, context_tokens))

    def prefill_s(self, n_tokens: float, cached_tokens: float = 0.0) -> float:
        """Seconds of the node for the prompt's `n_tokens` that are computed after `cached_tokens`.

        Steps of `step_tokens` rows are full: shorter prompts share one, a longer one has many.
        """
        n_prompts = max(self.step_tokens / n_tokens, 1.0)
        each, context_tokens = self.step_tokens / n_prompts, cached_tokens + n_tokens / 2
        step = self._step_s(Rows(n_prompts, each, context_tokens, is_prefill=True))
        return step * n_tokens / self.step_tokens

    def _step_s(self, rows: Rows) -> float:
        """The first micro-batch passes all stages; each other one follows behind the slowest stage."""
        n_parts = count_micro_batches(int(rows.n_rows), self.cut.pp)
        part = rows.part(n_parts)
        distinct = {id(stage): stage for stage in self.stages}
        seconds = {each: self._stage_s(stage, part) for each, stage in distinct.items()}
        stages = [seconds[id(stage)] for stage in self.stages]
        hops = hops_s(self.model, self.cut, self.card, part.n_rows)
        return sum(stages) + (n_parts - 1) * max(stages) + hops + self._head_s(rows)

    def _stage_s(self, stage: Stage, rows: Rows) -> float:
        own = Rows(max(rows.n_sequences / self.cut.dp, 1.0), rows.each, rows.context_tokens, rows.is_prefill)
        read, flops = 0.0, 0.0
        for layer, count in stage.counted_layers:
            read += count * (self._attention_bytes(layer, own) + self._other_bytes(layer, rows.n_rows))
            flops += count * (self._attention_flops(layer, own) + self._other_flops(layer, rows.n_rows))
        n_sums = 2 * len(stage.layers) + (stage.embedding_bytes > 0)
        exchanges = n_sums * sum_s(self.model, self.cut, self.card, rows.n_rows, self.sums)
        exchanges += len(stage.layers) * share_s(self.model, self.cut, self.card, own.n_rows)
        return self._bound_s(read, flops) + len(stage.layers) * LAYER_OVERHEAD_S + exchanges

    def _head_s(self, rows: Rows) -> float:
        """The logits of the whole step: of the last row of a prompt, of all rows that decode."""
        n_rows = rows.n_sequences if rows.is_prefill else rows.n_rows
        last = self.stages[-1]
        return self._bound_s(last.head_bytes / self.cut.tp, 2 * last.head_params * n_rows / self.cut.tp)

    def _bound_s(self, read: float, flops: float) -> float:
        return max(read / self.card.copy_bytes_per_s, flops / self.card.bf16_flops) / EFFICIENCY

    def _attention_bytes(self, layer: LayerShape, own: Rows) -> float:
        """Weights and KV that one card reads."""
        kv = own.n_sequences * (layer.kv_token_bytes * own.context_tokens + layer.kv_window_bytes)
        weights = layer.attention_bytes + (self.cut.heads_copies - 1) * layer.heads_bytes
        return weights / self.cut.attention_cards + kv * self.cut.dp / kv_shares(self.model, self.cut)

    def _other_bytes(self, layer: LayerShape, n_rows: float) -> float:
        """Bytes beside attention that the card with the most used experts reads."""
        experts = self.cut.ep * layer.fullest_part_hits(n_rows, self.cut.ep) * layer.expert_bytes
        return (layer.shared_bytes + experts) / self.cut.tp

    def _attention_flops(self, layer: LayerShape, own: Rows) -> float:
        """Attention's operations on one card, with its copies of the projections."""
        multiplied = layer.attention_params + (self.cut.heads_copies - 1) * layer.heads_params
        of_context = layer.prefill_flops if own.is_prefill else layer.context_flops
        a_row = 2 * multiplied + of_context * own.context_tokens
        return a_row * own.n_rows / self.cut.attention_cards

    def _other_flops(self, layer: LayerShape, n_rows: float) -> float:
        return 2 * (layer.active_params - layer.attention_params) * n_rows / self.cut.tp

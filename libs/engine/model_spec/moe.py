"""DeepSeek-V3 routing: sigmoid scores, a correction bias that steers choice only, expert groups."""

from __future__ import annotations

import torch

from libs.engine.model_spec.config import ModelConfig


def route(
    logits: torch.Tensor, correction_bias: torch.Tensor, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] fp32 -> expert ids [T, k] i64 and their weights [T, k] fp32 (noaux_tc).

    A group's score is the sum of its two best experts; experts outside the best `topk_group` groups are never
    chosen. Weights come from the scores without the bias.
    """
    scores = logits.sigmoid()
    choice = scores + correction_bias
    if config.n_group > 1:
        grouped = choice.view(choice.shape[0], config.n_group, -1)
        best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = best_two.topk(config.topk_group, dim=-1).indices
        outside = torch.ones_like(best_two, dtype=torch.bool).scatter_(1, kept, False)
        choice = grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
    ids = choice.topk(config.experts_per_token, dim=-1).indices
    weights = scores.gather(1, ids)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * config.routed_scaling_factor

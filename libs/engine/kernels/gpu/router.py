"""DeepSeek-V3 routing on the device: one program a token. The torch twin is `model_spec.moe.route`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _route_program(
    logits,
    bias,
    ids,
    weights,
    scaling,
    N_EXPERTS: tl.constexpr,
    N_CHOSEN: tl.constexpr,
    N_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    NORMALISES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < N_EXPERTS
    score = 1.0 / (1.0 + tl.exp(-tl.load(logits + row * N_EXPERTS + expert, mask=inside, other=0.0)))
    choice = score + tl.load(bias + expert, mask=inside, other=0.0)
    # A NaN counts as largest, as in torch: the row picks valid experts, and its output stays NaN.
    choice = tl.where(choice != choice, float("inf"), choice)
    choice = tl.where(inside, choice, float("-inf"))
    if N_GROUPS > 1:
        GROUP: tl.constexpr = N_EXPERTS // N_GROUPS
        group = expert // GROUP
        # Every expert carries the score of its group: the sum of the group's two best.
        group_score = tl.full((BLOCK,), float("-inf"), tl.float32)
        for g in range(N_GROUPS):
            member = tl.where(inside & (group == g), choice, float("-inf"))
            best = tl.argmax(member, 0)
            sum_of_best = tl.max(member, 0)
            if GROUP > 1:
                sum_of_best += tl.max(tl.where(expert == best, float("-inf"), member), 0)
            group_score = tl.where(inside & (group == g), sum_of_best, group_score)
        kept = expert < 0
        for _ in range(KEPT_GROUPS):
            best_group = tl.argmax(group_score, 0) // GROUP
            is_best = group == best_group
            kept = kept | is_best
            group_score = tl.where(is_best, float("-inf"), group_score)
        choice = tl.where(kept, choice, float("-inf"))
    slot = tl.arange(0, BLOCK_CHOSEN)
    chosen = tl.zeros((BLOCK_CHOSEN,), tl.int32)
    weight = tl.zeros((BLOCK_CHOSEN,), tl.float32)
    for k in range(N_CHOSEN):
        best = tl.argmax(choice, 0)
        best_score = tl.sum(tl.where(expert == best, score, 0.0), 0)
        chosen = tl.where(slot == k, best, chosen)
        weight = tl.where(slot == k, best_score, weight)
        choice = tl.where(expert == best, float("-inf"), choice)
    if NORMALISES:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    stored = slot < N_CHOSEN
    tl.store(ids + row * N_CHOSEN + slot, chosen, mask=stored)
    tl.store(weights + row * N_CHOSEN + slot, weight * scaling, mask=stored)


def choose_experts(
    logits: torch.Tensor,
    correction_bias: torch.Tensor,
    *,
    n_chosen: int,
    n_group: int,
    topk_group: int,
    normalises: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] fp32 -> expert ids [T, k] i32, best first, and their weights [T, k] fp32."""
    n_rows, n_experts = logits.shape
    ids = torch.empty(n_rows, n_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(n_rows, n_chosen, dtype=torch.float32, device=logits.device)
    _route_program[(n_rows,)](
        logits,
        correction_bias,
        ids,
        weights,
        scaling,
        N_EXPERTS=n_experts,
        N_CHOSEN=n_chosen,
        N_GROUPS=n_group,
        KEPT_GROUPS=topk_group,
        NORMALISES=normalises,
        BLOCK=triton.next_power_of_2(n_experts),
        BLOCK_CHOSEN=triton.next_power_of_2(n_chosen),
        num_warps=4,
    )
    return ids, weights

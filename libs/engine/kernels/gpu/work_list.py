"""The list of tiles that the persistent programs of a grouped product take their work from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Batches of this many pairs of a token and an expert, or fewer, are not sorted: every pair is an item.
FEW_PAIRS = 128
# Pairs of a tile, for up to so many pairs an expert on average; above them it is 64.
_TILES = ((8, 2), (16, 32))


@dataclass(frozen=True, slots=True)
class WorkList:
    """Items are up to `block` pairs of one expert; a pair is token * experts_per_token + slot.

    order [P]               pairs, those of an expert adjacent
    expert, first, count    of each item: its expert, its first place in `order`, its pairs
    n_items [1]             items that exist; the tensors may be longer
    """

    order: torch.Tensor
    expert: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    n_items: torch.Tensor
    block: int


def build_work_list(expert_of_pair: torch.Tensor, n_experts: int) -> WorkList:
    """expert_of_pair [P] i32, -1 for a pair without an expert here. Nothing waits for the device."""
    n_pairs = expert_of_pair.shape[0]
    device = expert_of_pair.device
    if n_pairs <= FEW_PAIRS:
        places = torch.arange(n_pairs, dtype=torch.int32, device=device)
        count = (expert_of_pair >= 0).int()
        n_items = torch.full((1,), n_pairs, dtype=torch.int32, device=device)
        return WorkList(places, expert_of_pair.clamp(min=0), places, count, n_items, 8)
    block = next((b for b, most in _TILES if n_pairs <= most * n_experts), 64)
    # Pairs without an expert come first, in a bin that makes no item.
    order = expert_of_pair.argsort(stable=True)
    counts = torch.zeros(n_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, expert_of_pair.long() + 1, torch.ones_like(order))
    starts = counts.cumsum(0)[:-1]
    counts = counts[1:]
    n_tiles = (counts + block - 1) // block
    ends = n_tiles.cumsum(0)
    most = min(n_pairs, n_experts) + n_pairs // block
    item = torch.arange(most, device=device)
    expert = torch.searchsorted(ends, item, right=True).clamp(max=n_experts - 1)
    inside = (item - ends[expert] + n_tiles[expert]) * block
    count = (counts[expert] - inside).clamp(0, block)
    return WorkList(
        order.int(),
        expert.int(),
        (starts[expert] + inside).int(),
        count.int(),
        ends[-1:].int(),
        block,
    )


def single_list(n_rows: int, device: torch.device) -> WorkList:
    """All rows belong to expert 0: a plain product."""
    block = next((b for b in (8, 16) if n_rows <= b), 64)
    first = torch.arange(0, n_rows, block, dtype=torch.int32, device=device)
    return WorkList(
        torch.arange(n_rows, dtype=torch.int32, device=device),
        torch.zeros_like(first),
        first,
        (n_rows - first).clamp(max=block),
        torch.full((1,), first.shape[0], dtype=torch.int32, device=device),
        block,
    )

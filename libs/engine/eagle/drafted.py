"""Reads the drafts of a head from the memory where it made them."""

from __future__ import annotations

import torch


def read_drafts(tokens: torch.Tensor, likely: torch.Tensor, min_confidence: float) -> list[list[int]]:
    """tokens and their probabilities [S, n] -> the drafts of each, up to the product `min_confidence`.

    One copy brings both to the host, which waits here for a device.
    """
    read = torch.stack((tokens.double(), likely.double())).cpu()
    counts = (read[1].cumprod(dim=1) >= min_confidence).sum(dim=1).tolist()
    rows = read[0].long().tolist()
    return [row[:count] for row, count in zip(rows, counts, strict=True)]

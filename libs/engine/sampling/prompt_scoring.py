"""Reduces the logits of prompt rows to log probabilities of the prompt's tokens, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from libs.engine.step.batch import ForwardBatch
from libs.engine.step.prompt_scores import PromptScores

# The logits that exist at once: 102 rows of a vocabulary of 163,840.
MAX_LOGITS_BYTES = 64 << 20


def score_prompts(
    batch: ForwardBatch, logits_of: Callable[[torch.Tensor], torch.Tensor | None], *, vocab_size: int
) -> PromptScores | None:
    """Score `batch.scored_tokens` by their rows; None without any. `first` of the result is 0.

    `logits_of` maps row indices [r] to logits [r, V] fp32, or to None at a rank of a group that has none. All
    ranks call it for the same rows.
    """
    n_rows = len(batch.scored_rows)
    if not n_rows:
        return None
    step = max(1, MAX_LOGITS_BYTES // (4 * vocab_size))
    parts = []
    for start in range(0, n_rows, step):
        rows = torch.from_numpy(batch.scored_rows[start : start + step]).long()
        logits = logits_of(rows)
        if logits is not None:
            tokens = torch.from_numpy(batch.scored_tokens[start : start + step]).long()
            parts.append(score_rows(logits, tokens, top=min(batch.scored_top, vocab_size)))
    if not parts:
        return None
    logprobs, ranks, top_ids, top_logprobs = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return PromptScores(0, logprobs, ranks, top_ids, top_logprobs)


def score_rows(logits: torch.Tensor, tokens: torch.Tensor, *, top: int) -> tuple[np.ndarray, ...]:
    """Log probabilities and ranks of `tokens` [r] in logits [r, V]; ids and log probabilities of the `top`.

    A token's rank is 1 plus the number of tokens that are more likely.
    """
    own = logits.gather(-1, tokens.to(logits.device)[:, None])
    total = logits.logsumexp(dim=-1, keepdim=True)
    ranks = 1 + (logits > own).sum(dim=-1)
    values, ids = logits.topk(top, dim=-1)
    return (
        (own - total).squeeze(-1).cpu().numpy(),
        ranks.int().cpu().numpy(),
        ids.int().cpu().numpy(),
        (values - total).cpu().numpy(),
    )

"""Samples tokens from logits, vectorised over the rows of a step.

For each row: adjust (logits_processors.py) -> masks of structured output (masked_logits.py) -> greedy:
argmax; else temperature -> min-p -> top-k -> top-p -> one draw by inverse CDF in vocabulary order with the
uniform of (seed, output index). Structured output may replace a token, so that the answer ends within its
limit (settled_tokens.py). The token is a pure function of (logits row, history, params, mask, limit, index).
Other rows and drafts do not change it.

  temperature  logits / temperature; below 1e-5 greedy
  min_p        keeps tokens with probability >= min_p * the largest
  top_k        keeps the k most likely (and ties with the k-th)
  top_p        of those, the fewest most likely whose share reaches top_p (and ties with the last)

`logprobs` are those of the raw logits, before any of these steps. So they equal vLLM's default
(`logprobs_mode=raw_logprobs`) and OpenAI's, whose values do not change with temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from libs.engine.sampling.counter_rng import uniform
from libs.engine.sampling.logits_processors import adjust, is_adjusted
from libs.engine.sampling.masked_logits import apply_masks
from libs.engine.sampling.settled_tokens import settle_tokens
from libs.engine.step.constraint import StepMasks
from libs.engine.step.step_model import BAD_TOKEN, SequenceRows
from libs.engine.step.types import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5
_CANDIDATES = (256, 8192)  # so many largest logits are searched for the cuts before a full sort
_SEGMENT = 512  # tokens of the vocabulary in one segment of a draw


@torch.inference_mode()
def sample(
    logits: torch.Tensor, sequences: Sequence[SequenceRows], masks: StepMasks | None = None
) -> tuple[list[int], list[TokenLogprobs | None] | None]:
    """Sample a token for each row of logits [R, V] fp32, which change in place; R = sum of n_sampled.

    Logprobs are None for rows that did not request them. A row without a finite maximum, after an overflow in
    the model, gets BAD_TOKEN and does not affect other rows.
    """
    sequences = [s for s in sequences if s.n_sampled]
    per_row = [s.params for s in sequences for _ in range(s.n_sampled)]
    if not per_row:
        return [], None
    asking = [i for i, params in enumerate(per_row) if params.logprobs is not None]
    raw = torch.log_softmax(logits[asking].float(), dim=-1) if asking else None
    if any(is_adjusted(s) for s in sequences):
        adjust(logits, sequences)
    if masks is not None:
        apply_masks(logits, masks)
    tokens = logits.argmax(dim=-1)  # the index of the NaN in a row with one
    bad = ~logits.gather(-1, tokens[:, None]).isfinite()
    drawing = [i for i, params in enumerate(per_row) if params.temperature >= GREEDY_BELOW]
    if drawing:
        indices = [s.first_index + j for s in sequences for j in range(s.n_sampled)]
        draws = [uniform(per_row[i].seed, indices[i]) for i in drawing]
        usable = logits[drawing].masked_fill_(bad[drawing], 0.0)
        tokens[drawing] = _draw(usable, [per_row[i] for i in drawing], draws)
    chosen: list[int] = tokens.masked_fill_(bad.squeeze(-1), BAD_TOKEN).tolist()
    settle_tokens(chosen, sequences, lambda row, tokens: tokens[int(logits[row, tokens].argmax())])
    if raw is None:
        return chosen, None
    return chosen, _logprobs(raw, asking, chosen, per_row)


def is_cut(params: SamplingParams) -> bool:
    """Whether tokens are drawn from a part of the vocabulary."""
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def _draw(logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> torch.Tensor:
    """Draw by inverse CDF: the first token at which the cumulated probability exceeds the draw."""
    scaled = logits / _column(logits, [p.temperature for p in params])
    scaled -= scaled.amax(dim=-1, keepdim=True)
    weights = scaled.exp()
    if any(is_cut(p) for p in params):
        weights.masked_fill_(scaled < _threshold(scaled, weights, params), 0.0)
    return invert_cdf(weights, torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None])


def invert_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Invert the CDF in two levels, so that only one segment of the vocabulary is cumulated in full."""
    width = min(_SEGMENT, weights.shape[-1])
    padded = pad(weights, (0, -weights.shape[-1] % width))
    segments = padded.view(len(weights), -1, width)
    by_segment = segments.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total = by_segment[:, -1:]
    # A product that rounds up to the total would point after the last token.
    target = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    segment = torch.searchsorted(by_segment, target, right=True)
    before = pad(by_segment, (1, 0)).gather(-1, segment)
    rows = torch.arange(len(weights), device=weights.device)
    inside = segments[rows, segment.squeeze(-1)].double()
    # The two levels add in different orders, so the target may exceed the segment by a rounding error. Then
    # the segment's last token with any weight is chosen.
    last = (inside > 0).double().cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    within = torch.searchsorted(inside.cumsum(dim=-1), target - before, right=True)
    return (segment * width + torch.minimum(within, last)).squeeze(-1)


def _threshold(scaled: torch.Tensor, weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """[R, 1]: tokens below this are cut. `scaled` has maximum 0 in each row; weights = exp(scaled)."""
    limit = _column(scaled, [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params])
    filtered = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    vocab_size = scaled.shape[-1]
    for width in (*(w for w in _CANDIDATES if w < vocab_size), vocab_size):
        if not filtered:
            break
        some = (scaled[filtered], weights[filtered], limit[filtered])
        found, resolved = _ranked(*some, [params[i] for i in filtered], width)
        limit[filtered] = torch.where(resolved, found, limit[filtered])
        filtered = [i for i, done in zip(filtered, resolved.squeeze(-1).tolist(), strict=True) if not done]
    return limit


def _ranked(
    scaled: torch.Tensor,
    weights: torch.Tensor,
    limit: torch.Tensor,
    params: Sequence[SamplingParams],
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds [R, 1] from the `width` largest of each row, and whether they lie among those.

    A threshold is a value and not a rank, so equal logits fare equally and any width gives the same.
    """
    vocab_size = scaled.shape[-1]
    largest = scaled.topk(width, dim=-1).values
    ranks = [min(p.top_k, vocab_size) or vocab_size for p in params]
    top_k = torch.tensor(ranks, device=scaled.device)[:, None]
    resolved = (top_k <= width) | (top_k == vocab_size)
    kth = largest.gather(-1, (top_k - 1).clamp(max=width - 1))
    limit = torch.where((top_k < vocab_size) & resolved, torch.maximum(limit, kth), limit)
    if all(p.top_p >= 1 for p in params):
        return limit, resolved
    # top_p is a share of the weight that min-p and top-k left.
    left = torch.where(scaled >= limit, weights, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    kept = torch.where(largest >= limit, largest.exp(), 0.0)
    top_p = _column(left, [p.top_p for p in params])
    n_below = (kept.cumsum(dim=-1, dtype=torch.float64) < top_p * left).sum(dim=-1, keepdim=True)
    last = largest.gather(-1, n_below.clamp(max=width - 1))
    cuts = top_p < 1
    resolved = resolved & (~cuts | (n_below < width) | (width == vocab_size))
    return torch.where(cuts, torch.maximum(limit, last), limit), resolved


def _logprobs(
    raw: torch.Tensor, asking: Sequence[int], chosen: Sequence[int], per_row: Sequence[SamplingParams]
) -> list[TokenLogprobs | None]:
    answers: list[TokenLogprobs | None] = [None] * len(per_row)
    most = min(max(per_row[i].logprobs or 0 for i in asking), raw.shape[-1])
    values, ids = raw.topk(most, dim=-1)
    own = raw.gather(-1, torch.tensor([[max(chosen[i], 0)] for i in asking], device=raw.device))
    rows = zip(asking, own.squeeze(-1).tolist(), ids.tolist(), values.tolist(), strict=True)
    for i, logprob, top_ids, top_values in rows:
        n = per_row[i].logprobs or 0
        answers[i] = TokenLogprobs(logprob, tuple(zip(top_ids[:n], top_values[:n], strict=True)))
    return answers


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]

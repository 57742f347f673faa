"""Sampling without a wait for the device: the sampler of rows that need no work of the host in between.

The parameters of all rows are tensors on the device, so that a CUDA graph can hold the whole operation.
Tokens are those of `sample`, whose operations and order these are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from libs.engine.sampling.counter_rng import uniform
from libs.engine.sampling.logits_processors import is_adjusted
from libs.engine.sampling.sampler import GREEDY_BELOW, invert_cdf, is_cut
from libs.engine.step.step_model import BAD_TOKEN, SequenceRows

# (scaled [R, V], weights [R, V], min_p_log, top_k, top_p) -> the least scaled logit that each row may draw.
CutRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """The parameters of each row [R]: temperature and min_p_log fp32, top_k i32, top_p and draw fp64."""

    temperature: torch.Tensor
    min_p_log: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    draw: torch.Tensor


@dataclass(frozen=True, slots=True)
class DrawArrays:
    """`DrawParameters` in the host, and whether any row draws, and cuts what it draws from."""

    temperature: npt.NDArray[np.float32]
    min_p_log: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float64]
    draw: npt.NDArray[np.float64]
    any_drawn: bool
    any_cut: bool


def samples_on_device(rows: SequenceRows) -> bool:
    """Whether the tokens of these rows depend on nothing that the host adds between logits and tokens."""
    return not (
        rows.constraint is not None
        or rows.params.logprobs is not None
        or len(rows.scored)
        or is_adjusted(rows)
    )


def draw_arrays(sequences: Sequence[SequenceRows]) -> DrawArrays:
    """The parameters of all sampled rows, in order."""
    per_row = [(s.params, s.first_index + j) for s in sequences for j in range(s.n_sampled)]
    drawn = [params.temperature >= GREEDY_BELOW for params, _ in per_row]
    cut = [is_cut(p) for p, _ in per_row]
    return DrawArrays(
        np.array([p.temperature for p, _ in per_row], np.float32),
        np.array([math.log(p.min_p) if p.min_p > 0 else -math.inf for p, _ in per_row], np.float32),
        np.array([p.top_k for p, _ in per_row], np.int32),
        np.array([p.top_p for p, _ in per_row], np.float64),
        np.array(
            [uniform(p.seed, i) if d else 0.0 for (p, i), d in zip(per_row, drawn, strict=True)], np.float64
        ),
        any_drawn=any(drawn),
        any_cut=any(d and c for d, c in zip(drawn, cut, strict=True)),
    )


def choose_tokens(
    logits: torch.Tensor, parameters: DrawParameters | None, cut: CutRows | None
) -> torch.Tensor:
    """A token [R] i64 for each row of logits [R, V] fp32, which stay as they are.

    Without `parameters` all rows are greedy, without `cut` none has min-p, top-k or top-p. A row without a
    finite maximum gets BAD_TOKEN.
    """
    tokens = logits.argmax(dim=-1)
    bad = ~logits.gather(-1, tokens[:, None]).isfinite()
    if parameters is not None:
        is_drawn = parameters.temperature >= GREEDY_BELOW
        drawn = _draw(logits.masked_fill(bad, 0.0), is_drawn, parameters, cut)
        tokens = torch.where(is_drawn, drawn, tokens)
    return tokens.masked_fill(bad.squeeze(-1), BAD_TOKEN)


def _draw(
    logits: torch.Tensor, is_drawn: torch.Tensor, parameters: DrawParameters, cut: CutRows | None
) -> torch.Tensor:
    scaled = logits / parameters.temperature.masked_fill(~is_drawn, 1.0)[:, None]
    scaled -= scaled.amax(dim=-1, keepdim=True)
    weights = scaled.exp()
    if cut is not None:
        least = cut(scaled, weights, parameters.min_p_log, parameters.top_k, parameters.top_p)
        weights.masked_fill_(scaled < least, 0.0)
    return invert_cdf(weights, parameters.draw[:, None])

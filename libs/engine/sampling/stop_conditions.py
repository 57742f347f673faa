"""Decides when a sequence ends. Pure.

A stop token is emitted as the last token. If a token meets both conditions, the reason is `stop`.
"""

from __future__ import annotations

from collections.abc import Sequence

from libs.engine.step.types import FinishReason, SamplingParams


def cut_at_stop(
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    n_output_tokens: int,
    n_tokens: int,
    max_context_tokens: int,
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The `tokens` up to the end of the sequence, and the finish reason; None if it continues.

    `n_output_tokens` were emitted before, in earlier attempts too. `n_tokens` are in the context.
    """
    stops = () if params.ignore_eos else params.stop_token_ids
    for count, token in enumerate(tokens, start=1):
        if token in stops and n_output_tokens + count > params.min_tokens:
            return tuple(tokens[:count]), "stop"
        if n_output_tokens + count >= params.max_tokens or n_tokens + count >= max_context_tokens:
            return tuple(tokens[:count]), "length"
    return tuple(tokens), None

"""When a sequence ends. Pure.

A stop token is emitted as the last token. Order at one token: stop before length.
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
    """Those of the new `tokens` that are emitted, and why it ends there, if it does.

    `n_output_tokens` were emitted before (earlier attempts included); `n_tokens` are in the context.
    """
    stops = () if params.ignore_eos else params.stop_token_ids
    for count, token in enumerate(tokens, start=1):
        if token in stops and n_output_tokens + count > params.min_tokens:
            return tuple(tokens[:count]), "stop"
        if n_output_tokens + count >= params.max_tokens or n_tokens + count >= max_context_tokens:
            return tuple(tokens[:count]), "length"
    return tuple(tokens), None

"""Rows of a prompt as a fake worker sends them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from slipstream.v1 import common_pb2

ROWS_A_PIECE = 7


def prompt_pieces(
    prompt: Sequence[int], sampling: common_pb2.SamplingParams
) -> Iterator[common_pb2.PromptLogprobs]:
    """Rows of a prompt whose log probability names their position, ROWS_A_PIECE at a time."""
    if not sampling.HasField("prompt_logprobs"):
        return
    top = sampling.prompt_logprobs
    for first in range(1, len(prompt), ROWS_A_PIECE):
        positions = np.arange(first, min(first + ROWS_A_PIECE, len(prompt)))
        likely = np.repeat(np.array(prompt)[positions], top).reshape(len(positions), top)
        yield common_pb2.PromptLogprobs(
            first_position=first,
            logprobs=(-positions / 8).astype("<f4").tobytes(),
            ranks=np.full(len(positions), 2, "<u4").tobytes(),
            top_ids=likely.astype("<u4").tobytes(),
            top_logprobs=np.broadcast_to(-0.5 - np.arange(top), likely.shape).astype("<f4").tobytes(),
        )

"""One random head of each kind, beside one random target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from libs.engine.step.draft_head import ContextRows, DraftHead
from tests.engine.eagle.plain_block_head import RandomBlockHead, write_random_block_head
from tests.engine.random_head import RandomHead, write_random_head
from tests.engine.random_latent_head import RandomLatentHead, write_random_latent_head

WRITERS: dict[str, Callable[[Path], object]] = {
    "grouped": lambda path: write_random_head(path, RandomHead(draft_vocab_size=100)),
    "norms": lambda path: write_random_head(
        path, RandomHead(extra=(("norm_before_residual", True), ("norm_output", True)))
    ),
    "latent": lambda path: write_random_latent_head(path, RandomLatentHead()),
    "latent without q_a": lambda path: write_random_latent_head(path, RandomLatentHead(q_lora_rank=None)),
    "block": lambda path: write_random_block_head(path, RandomBlockHead()),
}
# Rows of each sequence and where they begin; one is longer than the window, whose rows move to the front.
PIECES = ((1, 0), (9, 0), (5, 140), (40, 3))


def extend_heads(heads: list[DraftHead], *, seed: int, rounds: int = 3) -> list[str]:
    """Give all heads the same rows, in several pieces; returns the sequences."""
    random = np.random.default_rng(seed)
    ends = [start for _, start in PIECES]
    for _ in range(rounds):
        rows = []
        for i, (n, _) in enumerate(PIECES):
            tokens = random.integers(0, 256, n).astype(np.uint32)
            rows.append(ContextRows(f"s{i}", ends[i], tokens, random.normal(size=(n, 64)).astype(np.float32)))
            ends[i] += n
        for head in heads:
            head.extend_batch(rows)
    return [f"s{i}" for i in range(len(PIECES))]

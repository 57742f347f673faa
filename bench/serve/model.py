"""A random checkpoint of the benchmark's shape with a tokenizer of its vocabulary, for serving benchmarks."""

from __future__ import annotations

import random
from pathlib import Path

from models.bpe import train_tokenizer
from tests.support.random_checkpoint import BENCH_CONFIG, RandomCheckpoint, write_random_checkpoint

_SYLLABLES = [a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]


def make_serve_model(model_dir: Path, seed: int = 1) -> None:
    """Write the checkpoint and a tokenizer trained on made-up words, enough of them for every rank."""
    spec = RandomCheckpoint(config=dict(BENCH_CONFIG), quantization="none")
    config = write_random_checkpoint(model_dir, spec)
    rng = random.Random(seed)
    words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4))) for _ in range(6000)]
    texts = [" ".join(rng.choices(words, k=200)) for _ in range(400)]
    train_tokenizer(texts, model_dir, vocab_size=config.vocab_size)

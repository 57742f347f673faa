"""Drills in copying: random tokens in which earlier stretches are repeated.

In dialogues only few tokens require copying, so a small model takes long to learn it (induction heads,
arXiv 2209.11895). In a drill half of the tokens are predictable only by copying.
"""

from __future__ import annotations

from random import Random

import torch

from libs.text.tokenizer import Tokenizer
from models.training.batches import TrainingBatch

_FRESH_TOKENS = (3, 12)
_COPIED_TOKENS = (4, 16)
# Tokens of the repeated stretch that are not counted, as they do not show yet that it is a copy.
_LEAD_TOKENS = 2


def drill_batch(tokenizer: Tokenizer, seed: int, index: int, *, rows: int, row_tokens: int) -> TrainingBatch:
    """Return batch `index` of the drills of `seed`; `generated` marks the copied tokens."""
    rng = Random(f"copy-drill:{seed}:{index}")
    values = _value_tokens(tokenizer)
    ids = torch.zeros(rows, row_tokens, dtype=torch.int64)
    copied = torch.zeros(rows, row_tokens, dtype=torch.bool)
    for row in range(rows):
        # Half of the drills have digits and letters, as in order numbers and dates.
        vocabulary = values if rng.random() < 0.5 else range(tokenizer.base_vocab_tokens)
        tokens: list[int] = []
        marks: list[bool] = []
        while len(tokens) < row_tokens:
            fresh = [rng.choice(vocabulary) for _ in range(rng.randint(*_FRESH_TOKENS))]
            tokens += fresh
            marks += [False] * len(fresh)
            length = rng.randint(*_COPIED_TOKENS)
            start = rng.randrange(max(1, len(tokens) - length))
            stretch = tokens[start : start + length]
            tokens += stretch
            marks += [position >= _LEAD_TOKENS for position in range(len(stretch))]
        ids[row] = torch.tensor(tokens[:row_tokens])
        copied[row] = torch.tensor(marks[:row_tokens])
    return TrainingBatch(ids, copied, torch.ones_like(copied))


def _value_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return tokens without a space or lower-case letter: digits, capitals, punctuation in values."""
    allowed = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ-.:@")
    return [t for t in range(tokenizer.base_vocab_tokens) if set(tokenizer.token_bytes(t)) <= allowed]

"""Drills in copying: random tokens in which earlier stretches come again.

Dialogues hold few tokens that only copying can predict, so a small model takes long to find out how to
copy (induction heads, arXiv 2209.11895). In a drill, half of the tokens can be predicted by nothing else.
"""

from __future__ import annotations

from random import Random

import torch

from libs.text.tokenizer import Tokenizer
from models.training.batches import Batch

_FRESH_TOKENS = (3, 12)
_COPIED_TOKENS = (4, 16)
# Tokens of the stretch that are not counted: nothing says yet that it is a copy.
_LEAD_TOKENS = 2


def drill_batch(tokenizer: Tokenizer, seed: int, index: int, *, rows: int, row_tokens: int) -> Batch:
    """Batch `index` of the endless drills of `seed`; `generated` marks what is a copy."""
    rng = Random(f"copy-drill:{seed}:{index}")
    values = _value_tokens(tokenizer)
    ids = torch.zeros(rows, row_tokens, dtype=torch.int64)
    copied = torch.zeros(rows, row_tokens, dtype=torch.bool)
    for row in range(rows):
        # Half of the drills are of digits and letters, which is what order numbers and dates are made of.
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
    return Batch(ids, copied, torch.ones_like(copied))


def _value_tokens(tokenizer: Tokenizer) -> list[int]:
    """Tokens without a space or a lower-case letter: digits, capitals, punctuation inside of values."""
    allowed = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ-.:@")
    return [t for t in range(tokenizer.base_vocab_tokens) if set(tokenizer.token_bytes(t)) <= allowed]

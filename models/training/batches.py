"""Encoded dialogues in batches of about one length; batch `step` is a pure function of (seed, step)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from libs.text.chat_template import encode_chat
from libs.text.tokenizer import Tokenizer
from models.helpdesk.dialogues import LONG, SHORT, Dialogue, DialogueShape, generate_dialogue

_CHUNK = 384
"""Dialogues that are sorted by length together."""


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of a dialogue and the spans that the assistant writes."""

    token_ids: list[int]
    spans: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """`token_ids` [B, L] int64, padded on the right; `generated` [B, L] bool: written by the assistant.

    `valid` [B, L] bool: not padding.
    """

    token_ids: Tensor
    generated: Tensor
    valid: Tensor


def encode_dialogue(tokenizer: Tokenizer, dialogue: Dialogue) -> Example:
    """A whole dialogue, without a generation prompt at its end."""
    encoded = encode_chat(tokenizer, dialogue.messages, dialogue.tools, add_generation_prompt=False)
    return Example(encoded.token_ids, encoded.assistant_spans)


def collate(examples: list[Example], *, pad_id: int, max_tokens: int) -> TrainingBatch:
    """Pads to the longest example, itself cut to `max_tokens`."""
    width = min(max(len(e.token_ids) for e in examples), max_tokens)
    ids = torch.full((len(examples), width), pad_id, dtype=torch.int64)
    generated = torch.zeros(len(examples), width, dtype=torch.bool)
    valid = torch.zeros(len(examples), width, dtype=torch.bool)
    for row, example in enumerate(examples):
        kept = example.token_ids[:width]
        ids[row, : len(kept)] = torch.tensor(kept)
        valid[row, : len(kept)] = True
        for start, end in example.spans:
            generated[row, start : min(end, width)] = True
    return TrainingBatch(ids, generated, valid)


def dialogue_batches(
    tokenizer: Tokenizer, seed: int, *, step_tokens: int, start_chunk: int = 0
) -> Iterator[TrainingBatch]:
    """Endless batches of at most about `step_tokens` padded tokens, in an order fixed by `seed`."""
    chunk = start_chunk
    while True:
        yield from _chunk_batches(tokenizer, seed, chunk, step_tokens)
        chunk += 1


def _chunk_batches(tokenizer: Tokenizer, seed: int, chunk: int, step_tokens: int) -> list[TrainingBatch]:
    examples = encode_many(tokenizer, seed, _CHUNK, start=chunk * _CHUNK)
    examples.sort(key=lambda e: len(e.token_ids))
    batches: list[TrainingBatch] = []
    pending: list[Example] = []
    for example in examples:
        if pending and (len(pending) + 1) * len(example.token_ids) > step_tokens:
            batches.append(collate(pending, pad_id=_pad(tokenizer), max_tokens=step_tokens))
            pending = []
        pending.append(example)
    if pending:
        batches.append(collate(pending, pad_id=_pad(tokenizer), max_tokens=step_tokens))
    Random(f"{seed}:{chunk}").shuffle(batches)
    return batches


def long_batch(tokenizer: Tokenizer, seed: int, index: int, *, max_tokens: int) -> TrainingBatch:
    """One dialogue of dozens of turns, cut to `max_tokens`."""
    example = encode_dialogue(tokenizer, generate_dialogue(seed + 1_000_000, index, LONG))
    return collate([example], pad_id=_pad(tokenizer), max_tokens=max_tokens)


def encode_many(
    tokenizer: Tokenizer, seed: int, count: int, *, start: int = 0, shape: DialogueShape = SHORT
) -> list[Example]:
    """Dialogues [start, start + count) of `seed`, encoded."""
    return [
        encode_dialogue(tokenizer, generate_dialogue(seed, index, shape))
        for index in range(start, start + count)
    ]


def _pad(tokenizer: Tokenizer) -> int:
    return tokenizer.special_id("[PAD]")

"""How attention cuts the KV of each sequence over programs. The host knows all lengths, so it decides.

The cut depends on a sequence's length, and on the sequences and rows that the batch's bucket has room for. So
a step that is padded to its bucket gives the bits of the same step without padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from libs.engine.kernels.gpu.device_plan import absorbed_rows
from libs.engine.model_spec.plan import BatchPlan
from libs.engine.step.batch import Int32Array
from libs.engine.step.padded_rows import padded_rows

BLOCK_TOKENS = 64
_LEAST_SPLIT_TOKENS = 256
_TILE_VECTORS = 64  # query vectors of a program


@dataclass(frozen=True, slots=True)
class KvSplits:
    """tokens [S] i32 of a split of each sequence; of_row [A] i32: the splits with tokens that a row sees.

    A are the rows of absorbed sequences.

    n_splits  of the sequence with the most; a program whose split begins behind its context does nothing
    most_rows of an absorbed sequence
    """

    tokens: torch.Tensor
    of_row: torch.Tensor
    n_splits: int
    most_rows: int


def count_splits(n_sequences: int, most_rows: int, n_heads: int, n_processors: int) -> int:
    """The most splits of a sequence, so that about one program runs on each processor of the device.

    A program takes the whole shared memory of a processor, so that more programs would wait for each other.
    Both counts are those of the bucket of the step (`graphs/buckets.py`).
    """
    bucket = 1 << (n_sequences - 1).bit_length()
    n_tiles = bucket * -(-padded_rows(most_rows) * n_heads // _TILE_VECTORS)
    return max(n_processors // n_tiles, 1)


def choose_split_tokens(context_len: Int32Array, n_splits: int) -> Int32Array:
    """Tokens of KV in a split of each sequence, which then has at most `n_splits`.

    A split holds at least 256 tokens: each split writes and reads an fp32 result as large as 228 latents of
    64 heads.
    """
    tokens = -(-context_len // np.int32(n_splits * BLOCK_TOKENS)) * np.int32(BLOCK_TOKENS)
    at_least: Int32Array = np.maximum(tokens, np.int32(_LEAST_SPLIT_TOKENS))
    return at_least


def splits_of_rows(plan: BatchPlan, split_tokens: Int32Array) -> Int32Array:
    """[T]: the splits that hold tokens which each row sees."""
    of_row: Int32Array = -(-plan.visible // np.repeat(split_tokens, np.diff(plan.query_start)))
    return of_row


def upload_splits(plan: BatchPlan, split_tokens: Int32Array, device: torch.device) -> KvSplits:
    """The splits of a step's absorbed sequences."""

    def put(values: Int32Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device, non_blocking=True)

    counts = -(-plan.context_len // split_tokens)
    return KvSplits(
        put(split_tokens),
        put(splits_of_rows(plan, split_tokens)[absorbed_rows(plan)]),
        n_splits=int(counts[plan.absorbed].max()),
        most_rows=int(np.diff(plan.query_start)[plan.absorbed].max()),
    )

"""What decode steps as graphs take of a device's memory: an estimate from shapes. Pure; imports no torch.

No device has been measured. `tests/engine/graphs/test_step_memory.py` holds the estimate against the tensors
that the steps make. What a driver keeps for each graph is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.engine.graphs.buckets import BucketLimits, planned_buckets

_LOGIT_BYTES = 4
# A choice of tokens holds four fp32 copies of the logits at once, and a mask.
_CHOICE_LOGIT_BYTES = 17
# Of a forward pass beside its logits: activations of 256 rows, and what splits of the KV give.
_PASS_BYTES = 32 << 20
_VALUE_BYTES = 4
# Inputs of a row beside the page table: the rotation, and 14 numbers.
_ROW_INPUT_BYTES = 512


@dataclass(frozen=True, slots=True)
class StepMemory:
    """buffer_bytes: inputs and results of all buckets; pool_bytes: of the largest graph, which all share."""

    buffer_bytes: int
    pool_bytes: int

    @property
    def n_bytes(self) -> int:
        return self.buffer_bytes + self.pool_bytes


def estimate_step_memory(
    limits: BucketLimits, *, vocab_size: int, feature_width: int, n_blocks: int
) -> StepMemory:
    """`n_blocks`: of the longest context; `feature_width`: 0 without a draft head."""
    rows = limits.max_rows
    shapes = {bucket.shape for bucket in planned_buckets(limits)}
    inputs = sum(s.n_rows * _ROW_INPUT_BYTES + s.n_sequences * n_blocks * 4 for s in shapes)
    results = rows * (vocab_size * _LOGIT_BYTES + feature_width * _VALUE_BYTES)
    return StepMemory(inputs + results, rows * vocab_size * _CHOICE_LOGIT_BYTES + _PASS_BYTES)

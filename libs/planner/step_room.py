"""Memory of a card for the decode steps that a worker runs as graphs."""

from __future__ import annotations

from dataclasses import dataclass

from libs.engine.graphs.buckets import BucketLimits
from libs.engine.graphs.step_memory import estimate_step_memory
from libs.engine.step.draft_head import MAX_DRAFT_TOKENS
from libs.planner.model_shape import ModelShape

_PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class DecodeStepRoom:
    """Room for steps of so many sequences and drafts at most. Where there are drafts, there are features."""

    max_batch: int
    max_draft_tokens: int = MAX_DRAFT_TOKENS
    has_features: bool = True
    block_tokens: int = _PAGE_TOKENS

    def n_bytes(self, model: ModelShape, max_context_tokens: int | None = None) -> int:
        """An estimate: see `estimate_step_memory`."""
        context_tokens = min(max_context_tokens or model.max_context_tokens, model.max_context_tokens)
        return estimate_step_memory(
            BucketLimits(self.max_batch, self.max_draft_tokens + 1, self.has_features),
            vocab_size=model.vocab_size,
            feature_width=model.hidden_size if self.has_features else 0,
            n_blocks=-(-context_tokens // self.block_tokens),
        ).n_bytes

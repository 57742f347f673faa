"""How much memory the KV cache of one worker takes by default."""

from __future__ import annotations

from libs.engine.parallel.sizes import ParallelSizes
from libs.planner.cuts import Cut
from libs.planner.fit import IN_BF16, CardMemory, HeldForm, HostMemory, fit_memory
from libs.planner.model_shape import ModelShape

_LEAST_TOKENS = 4096
_ONE_RANK = ParallelSizes()


def cut_of(sizes: ParallelSizes) -> Cut:
    """The planner's form of a worker's `--parallel`."""
    return Cut(sizes.stage_ranks, sizes.pp, sizes.kv, sizes.dp)


def kv_cache_bytes(
    model: ModelShape,
    memory: CardMemory | HostMemory,
    *,
    max_batch: int,
    max_context_tokens: int | None = None,
    sizes: ParallelSizes = _ONE_RANK,
    held: HeldForm = IN_BF16,
) -> int:
    """Whole contexts for a full batch, or the tokens that `fit_memory` has room for; stored once.

    max_context_tokens  the longest context, if it is shorter than the model's

    A memory that leaves too little still gets some tokens: the loader refuses what truly does not fit.
    """
    token_bytes = held.kv_bytes(model.kv_token_bytes)
    context_tokens = min(max_context_tokens or model.max_context_tokens, model.max_context_tokens)
    tokens = min(max_batch * context_tokens, fit_memory(model, cut_of(sizes), memory, held=held).kv_tokens)
    return max(tokens, min(context_tokens, _LEAST_TOKENS)) * token_bytes

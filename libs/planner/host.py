"""How much of a host's memory the KV cache of one worker takes by default."""

from __future__ import annotations

from libs.planner.model_shape import ModelShape

# Interpreter, torch, gRPC, and the activations of a step.
OVERHEAD_BYTES = 512 << 20
# Of the KV cache: the copies of pages that peers read take up to half as much again.
_STAGING_SHARE = 0.5
_LEAST_TOKENS = 4096


def kv_cache_bytes(
    model: ModelShape,
    *,
    memory_bytes: int,
    max_batch: int,
    max_context_tokens: int | None = None,
    weight_growth: float = 1.0,
    kv_growth: float = 1.0,
) -> int:
    """Whole contexts for a full batch, or what `memory_bytes` leave beside weights and overhead.

    max_context_tokens  the longest context, if it is shorter than the model's
    weight_growth  size of the weights in memory, of their size in the checkpoint
    kv_growth      size of a cached value, of the two bytes of bf16

    A host that leaves too little still gets some tokens: the loader refuses what truly does not fit.
    """
    weights = int((model.weights_bytes - model.vision_bytes) * weight_growth)
    room = memory_bytes - weights - OVERHEAD_BYTES
    token_bytes = int(model.kv_token_bytes * kv_growth)
    context_tokens = min(max_context_tokens or model.max_context_tokens, model.max_context_tokens)
    wanted = max_batch * context_tokens * token_bytes
    least = min(context_tokens, _LEAST_TOKENS) * token_bytes
    return max(min(wanted, int(room / (1 + _STAGING_SHARE))), least)

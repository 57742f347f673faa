"""How much memory the KV cache of one worker takes."""

from __future__ import annotations

from libs.engine.parallel.sizes import ParallelSizes
from libs.planner.cuts import Cut
from libs.planner.fit import IN_BF16, CardMemory, HeldForm, HostMemory, fit_memory, memory_for_tokens
from libs.planner.shapes.model_shape import ModelShape
from slipstream.errors import InvalidArgument

LEAST_TOKENS = 4096
_ONE_RANK = ParallelSizes()


def cut_of(sizes: ParallelSizes) -> Cut:
    """The planner's form of a worker's `--parallel`."""
    return Cut(sizes.stage_ranks, sizes.pp, sizes.kv, sizes.dp, sizes.ep)


def kv_cache_bytes(
    model: ModelShape,
    memory: CardMemory | HostMemory,
    *,
    max_batch: int,
    max_context_tokens: int | None = None,
    sizes: ParallelSizes = _ONE_RANK,
    held: HeldForm = IN_BF16,
    stated_bytes: int | None = None,
) -> int:
    """Whole contexts for a full batch, or the tokens that `fit_memory` has room for; stored once.

    max_context_tokens  the longest context, if it is shorter than the model's
    stated_bytes        a stated size, which is returned where devices have room for it

    Raises InvalidArgument for `memory_bytes` where 4,096 tokens, or one shorter context, have no room, and
    for `kv_memory_bytes` where the stated size would leave too little of a device for the steps.
    """
    cut, token_bytes = cut_of(sizes), held.kv_bytes(model.kv_token_bytes)
    context_tokens = min(max_context_tokens or model.max_context_tokens, model.max_context_tokens)
    room = fit_memory(model, cut, memory, held=held).kv_tokens
    if stated_bytes is not None:
        if isinstance(memory, CardMemory) and stated_bytes > room * token_bytes:
            raise InvalidArgument(
                "kv_memory_bytes",
                f"{stated_bytes} bytes leave too little of {memory.n_bytes} bytes of each device for the "
                f"weights and {memory.overhead_text(cut)}: the most that works is {room * token_bytes}",
            )
        return stated_bytes
    least = min(context_tokens, LEAST_TOKENS)
    if room < least:
        needed = memory_for_tokens(model, cut, memory, least, held=held)
        place = "each device" if isinstance(memory, CardMemory) else "the host"
        raise InvalidArgument(
            "memory_bytes",
            f"{memory.n_bytes} bytes of {place} do not hold the weights, {memory.overhead_text(cut)} and the "
            f"KV cache of {least} tokens: the least that works is {needed}",
        )
    return min(max_batch * context_tokens, room) * token_bytes

"""The size of a worker's KV cache: what a flag states, or from the model and the memory it may take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from libs.common.runtime.memory_limit import memory_limit_bytes
from libs.engine.model_spec.config import load_config
from libs.engine.parallel.sizes import ParallelSizes
from libs.planner.decode_room import DecodeStepRoom
from libs.planner.fit import CardMemory, HeldForm, HostMemory, Staging
from libs.planner.kv_cache import kv_cache_bytes
from libs.planner.shapes.read_shape import read_shape

# fp16 weights are widened to fp32 unless another dtype is asked for.
_HELD_BYTES = {"float32": 4, "bfloat16": 2, "float16": 4}
# Without a flag a worker leaves half of the host to others. `slipstream up` divides the host by its workers.
_SHARE = 0.5


def kv_cache_size(
    model_dir: Path,
    memory: CardMemory | HostMemory,
    *,
    max_batch: int,
    weight_dtype: str,
    kv_dtype: str,
    max_context_tokens: int | None = None,
    sizes: ParallelSizes | None = None,
    decode_steps: DecodeStepRoom | None = None,
    draft_head_bytes: int = 0,
    stated_bytes: int | None = None,
) -> int:
    """The bytes of the cache. A stated size on the host is returned as it is: `build_engine` checks it there.

    `decode_steps`: of a worker whose decode steps are graphs; `draft_head_bytes`: of its draft head and
    of what makes features. Both are of a device.

    Raises InvalidArgument for an unusable config.json or too little memory. No vision tower is loaded.
    """
    if stated_bytes is not None and isinstance(memory, HostMemory):
        return stated_bytes
    config = load_config(model_dir)
    shape = replace(read_shape(model_dir), vision_bytes=0)
    if isinstance(memory, CardMemory):
        steps_bytes = 0 if decode_steps is None else decode_steps.n_bytes(shape, max_context_tokens)
        memory = replace(memory, decode_steps_bytes=steps_bytes, draft_head_bytes=draft_head_bytes)
    weights = config.dtype if weight_dtype == "auto" else weight_dtype
    kv = config.kv_dtype(weight_dtype, kv_dtype)
    return kv_cache_bytes(
        shape,
        memory,
        max_batch=max_batch,
        max_context_tokens=max_context_tokens,
        sizes=sizes or ParallelSizes(),
        held=HeldForm(_HELD_BYTES[weights], _HELD_BYTES[kv]),
        stated_bytes=stated_bytes,
    )


def worker_memory(
    memory_bytes: int | None,
    *,
    free_device_bytes: int | None,
    device_overhead_bytes: int,
    staging_bytes: int | None,
    is_staged: bool,
) -> CardMemory | HostMemory:
    """Where a worker holds weights and KV. `free_device_bytes`: of its device; None: it runs on the CPU."""
    if free_device_bytes is not None:
        return CardMemory(memory_bytes or free_device_bytes, device_overhead_bytes)
    staging = Staging() if staging_bytes is None else Staging(1.0, staging_bytes)
    return HostMemory(
        memory_bytes or int(memory_limit_bytes() * _SHARE), staging if is_staged else Staging(0.0, 0)
    )

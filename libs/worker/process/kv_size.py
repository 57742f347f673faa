"""The size of a worker's KV cache where no flag states it: from the model and the memory of the host."""

from __future__ import annotations

from pathlib import Path

from libs.common.runtime.memory_limit import memory_limit_bytes
from libs.engine.model_spec.config import ModelConfig, load_config
from libs.engine.model_spec.quantization import Fp8Blocks
from libs.planner.host import kv_cache_bytes
from libs.planner.read_shape import read_shape

_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Without a flag a worker leaves half of the host to others. `slipstream up` divides the host by its workers.
_SHARE = 0.5


def default_kv_bytes(
    model_dir: Path,
    *,
    memory_bytes: int | None,
    max_batch: int,
    weight_dtype: str,
    kv_dtype: str,
    max_context_tokens: int | None = None,
) -> int:
    """Raises InvalidArgument for an unusable config.json."""
    config = load_config(model_dir)
    held = config.dtype if weight_dtype == "auto" else weight_dtype
    kv = ("bfloat16" if held == "bfloat16" else "float32") if kv_dtype == "auto" else kv_dtype
    return kv_cache_bytes(
        read_shape(model_dir),
        memory_bytes=memory_bytes or int(memory_limit_bytes() * _SHARE),
        max_batch=max_batch,
        max_context_tokens=max_context_tokens,
        weight_growth=_weight_growth(config, held),
        kv_growth=_VALUE_BYTES[kv] / 2,
    )


def _weight_growth(config: ModelConfig, held: str) -> float:
    """FP8 is widened when it is loaded; INT4, most of a model that has it, stays as it is."""
    if isinstance(config.quantization, Fp8Blocks):
        return float(_VALUE_BYTES[held])
    if config.quantization is not None:
        return 1.0
    # fp16 weights are widened to fp32 unless another dtype is asked for.
    held_bytes = 4 if held == "float16" else _VALUE_BYTES[held]
    return held_bytes / _VALUE_BYTES[config.dtype]

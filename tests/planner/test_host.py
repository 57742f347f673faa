"""The default size of a worker's KV cache."""

from __future__ import annotations

from libs.engine.model.random_checkpoint import BENCH_CONFIG
from libs.planner.host import kv_cache_bytes
from libs.planner.mla_shape import mla_shape

MODEL = mla_shape({"model_type": "kimi_k2", "torch_dtype": "bfloat16", **BENCH_CONFIG}, "bench")
WHOLE_BATCH = 64 * MODEL.max_context_tokens * MODEL.kv_token_bytes


def test_a_large_host_holds_a_batch_of_whole_contexts() -> None:
    assert kv_cache_bytes(MODEL, memory_bytes=64 << 30, max_batch=64) == WHOLE_BATCH
    assert kv_cache_bytes(MODEL, memory_bytes=64 << 30, max_batch=8) == WHOLE_BATCH // 8
    doubled = kv_cache_bytes(MODEL, memory_bytes=64 << 30, max_batch=64, kv_growth=2.0)
    assert doubled == 2 * WHOLE_BATCH


def test_a_small_host_holds_what_weights_staging_and_overhead_leave() -> None:
    memory = 1 << 30
    kv = kv_cache_bytes(MODEL, memory_bytes=memory, max_batch=64)
    assert kv < WHOLE_BATCH
    assert 0.9 * memory < MODEL.weights_bytes + 1.5 * kv + (512 << 20) <= memory
    assert kv_cache_bytes(MODEL, memory_bytes=memory, max_batch=64, weight_growth=2.0) < kv


def test_a_host_that_leaves_nothing_gets_a_few_thousand_tokens() -> None:
    assert kv_cache_bytes(MODEL, memory_bytes=1, max_batch=64) == 4096 * MODEL.kv_token_bytes

"""The default KV cache of a worker, by dtype and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.engine.core.build import EngineOptions, build_engine
from libs.engine.model.random_checkpoint import RandomCheckpoint, write_random_checkpoint
from libs.worker.process import kv_size
from libs.worker.process.kv_size import default_kv_bytes
from slipstream.errors import InvalidArgument


def size(
    model_dir: Path, *, weight_dtype: str = "auto", kv_dtype: str = "auto", memory: int | None = None
) -> int:
    return default_kv_bytes(
        model_dir, memory_bytes=memory, max_batch=2, weight_dtype=weight_dtype, kv_dtype=kv_dtype
    )


def test_the_cache_holds_two_whole_contexts_in_its_dtype(tmp_path: Path) -> None:
    config = write_random_checkpoint(tmp_path, RandomCheckpoint())
    values = 2 * config.max_position_tokens * config.n_layers * config.latent_width
    assert size(tmp_path, memory=8 << 30) == 2 * values
    assert size(tmp_path, memory=8 << 30, kv_dtype="float32") == 4 * values
    assert size(tmp_path, memory=8 << 30, weight_dtype="float32") == 4 * values


def test_without_a_flag_half_of_what_the_process_may_use_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    memory = (512 << 20) + (3 << 20)
    monkeypatch.setattr(kv_size, "memory_limit_bytes", lambda: 2 * memory)
    assert size(tmp_path) == size(tmp_path, memory=memory) < size(tmp_path, memory=8 << 30)


def test_an_engine_states_the_context_that_it_can_hold(tmp_path: Path) -> None:
    config = write_random_checkpoint(tmp_path, RandomCheckpoint())
    for n_pages in (3, 4096):
        engine = build_engine(tmp_path, EngineOptions(n_pages=n_pages, block_tokens=16, kernels="torch"))
        assert engine.info.max_context_tokens == min(16 * n_pages, config.max_position_tokens)


def test_a_stated_context_bounds_the_cache_and_what_the_engine_takes(tmp_path: Path) -> None:
    config = write_random_checkpoint(tmp_path, RandomCheckpoint())
    whole = default_kv_bytes(
        tmp_path, memory_bytes=8 << 30, max_batch=2, weight_dtype="auto", kv_dtype="auto"
    )
    short = default_kv_bytes(
        tmp_path,
        memory_bytes=8 << 30,
        max_batch=2,
        weight_dtype="auto",
        kv_dtype="auto",
        max_context_tokens=config.max_position_tokens // 4,
    )
    assert short == whole // 4
    options = EngineOptions(n_pages=5, block_tokens=16, kernels="torch", max_context_tokens=70)
    assert build_engine(tmp_path, options).info.max_context_tokens == 70


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [(81, r"81 tokens need a KV cache of .* GB are missing"), (10**6, r"is more than the model's 4096")],
)
def test_a_context_that_does_not_fit_is_refused_by_how_much(tmp_path: Path, tokens: int, reason: str) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    options = EngineOptions(n_pages=5, block_tokens=16, kernels="torch", max_context_tokens=tokens)
    with pytest.raises(InvalidArgument, match=reason) as refused:
        build_engine(tmp_path, options)
    assert refused.value.field == "max_context_tokens"

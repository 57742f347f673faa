"""The default size of a worker's KV cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.parallel.sizes import parse_sizes
from libs.planner.cuts import Cut, cut_stages
from libs.planner.fit import PROCESS_OVERHEAD_BYTES, CardMemory, HeldForm, HostMemory, Staging, fit_memory
from libs.planner.kv_cache import LEAST_TOKENS, cut_of, kv_cache_bytes
from libs.planner.shapes.mla_shape import mla_shape
from slipstream.errors import InvalidArgument
from tests.support.random_checkpoint import BENCH_CONFIG

MODEL = mla_shape({"model_type": "kimi_k2", "torch_dtype": "bfloat16", **BENCH_CONFIG}, "bench")
WHOLE_BATCH = 64 * MODEL.max_context_tokens * MODEL.kv_token_bytes
SMALL = HostMemory(1 << 30)


def test_a_large_host_holds_a_batch_of_whole_contexts() -> None:
    assert kv_cache_bytes(MODEL, HostMemory(64 << 30), max_batch=64) == WHOLE_BATCH
    assert kv_cache_bytes(MODEL, HostMemory(64 << 30), max_batch=8) == WHOLE_BATCH // 8
    doubled = kv_cache_bytes(MODEL, HostMemory(64 << 30), max_batch=64, held=HeldForm(kv_value_bytes=4))
    assert doubled == 2 * WHOLE_BATCH


def test_a_small_host_holds_what_weights_staging_and_overhead_leave() -> None:
    kv = kv_cache_bytes(MODEL, SMALL, max_batch=64)
    assert kv < WHOLE_BATCH
    assert 0.9 * SMALL.n_bytes < MODEL.weights_bytes + 1.5 * kv + (512 << 20) <= SMALL.n_bytes
    assert kv_cache_bytes(MODEL, SMALL, max_batch=64, held=HeldForm(weight_value_bytes=4)) < kv


_CUTS = st.sampled_from(["tp=1", "tp=4", "tp=2,pp=2", "tp=2,kv=2", "tp=2,dp=2,ep=2"])


@given(_CUTS, st.integers(1, 2 * MODEL.max_context_tokens), st.booleans(), st.integers(0, 64 << 20))
def test_the_least_memory_that_a_refusal_names_works_and_a_byte_less_does_not(
    parallel: str, context_tokens: int, is_device: bool, apart_bytes: int
) -> None:
    """`apart_bytes`: of overhead on a device, of staged copies on the host."""
    memory = CardMemory(1, apart_bytes) if is_device else HostMemory(1, Staging(1.0, apart_bytes))
    sizes = parse_sizes(parallel)

    def size(n_bytes: int) -> int:
        given_memory = replace(memory, n_bytes=n_bytes)
        return kv_cache_bytes(
            MODEL, given_memory, max_batch=64, max_context_tokens=context_tokens, sizes=sizes
        )

    with pytest.raises(InvalidArgument, match="the least that works is") as refused:
        size(1)
    assert refused.value.field == "memory_bytes"
    overhead_bytes = apart_bytes if is_device else sizes.n_ranks * PROCESS_OVERHEAD_BYTES
    assert f"of {'each device' if is_device else 'the host'} do not hold" in str(refused.value)
    assert f", {overhead_bytes} bytes of overhead" in str(refused.value)
    least = int(str(refused.value).rpartition(" ")[2])
    wanted = min(context_tokens, MODEL.max_context_tokens, LEAST_TOKENS) * MODEL.kv_token_bytes
    assert wanted <= size(least) <= 2 * wanted
    with pytest.raises(InvalidArgument, match=str(least)):
        size(least - 1)


def test_staged_copies_take_of_the_host_what_they_are_given() -> None:
    """Never more than 4 GiB by default, as much as stated, and nothing where pages are registered."""
    sizes = [
        kv_cache_bytes(MODEL, HostMemory(SMALL.n_bytes, staging), max_batch=64)
        for staging in (Staging(), Staging(1.0, 64 << 20), Staging(0.0, 0))
    ]
    room = SMALL.n_bytes - MODEL.weights_bytes - (512 << 20)
    for found, wanted in zip(sizes, (room / 1.5, room - (64 << 20), room), strict=True):
        assert wanted - MODEL.kv_token_bytes < found <= wanted
    assert Staging().kv_room(100 << 30) == 96 << 30
    assert Staging().n_bytes(96 << 30) == 4 << 30
    assert Staging().n_bytes(2 << 30) == 1 << 30


def test_each_card_loses_its_overhead_and_nothing_to_staged_copies() -> None:
    memory = CardMemory((512 << 20) + MODEL.weights_bytes, overhead_bytes=500 << 20)
    kv = kv_cache_bytes(MODEL, memory, max_batch=4096)
    assert 12 << 20 >= kv > (12 << 20) - MODEL.kv_token_bytes


@pytest.mark.parametrize("cut", [Cut(1), Cut(1, replicas=2), Cut(2), Cut(1, 2)])
def test_pages_pass_through_the_host_where_a_worker_has_several_cards(cut: Cut) -> None:
    fit = fit_memory(MODEL, cut, CardMemory(4 << 30))
    assert fit.kv_bytes > 1 << 30
    pages_bytes = fit.host_bytes - fit.staged_bytes - cut.group_cards * PROCESS_OVERHEAD_BYTES
    assert pages_bytes == (fit.kv_bytes if cut.group_cards > 1 else 0)


def test_a_cut_of_a_worker_has_its_copies() -> None:
    """Of four ranks: two parts of the sequences have attention twice, two of the positions q and kv twice."""
    one, attention, heads = (
        MODEL.weights_bytes,
        *(sum(getattr(layer, name) for layer in MODEL.layers) for name in ("attention_bytes", "heads_bytes")),
    )
    copied = {
        "tp=4": 0,
        "tp=2,pp=2": 0,
        "tp=2,kv=2": heads,
        "tp=2,dp=2,ep=2": attention,
        "dp=4": 3 * attention,
    }
    for text, copies in copied.items():
        cut = cut_of(parse_sizes(text))
        assert cut.n_cards == 4
        held = sum(stage.card_bytes(cut) for stage in cut_stages(MODEL, cut.pp)) * cut.tp
        assert one + copies <= held <= one + copies + 4 * cut.pp
    assert Cut(4, dp=2).attention_cards == 2

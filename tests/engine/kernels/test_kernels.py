"""The compiled kernels against the torch ones, over shapes, storage formats and thread counts."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.engine.kernels.interface import Kernels
from libs.engine.kernels.library import load_library, processor_level
from libs.engine.kernels.native import NativeKernels
from libs.engine.kernels.native_stack import NativeStack
from libs.engine.kernels.torch_kernels import TorchKernels
from libs.engine.kv.cache import CacheShape, PagedLatentCache
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.stack import PlainStack
from libs.engine.model.weights import WeightLoader
from libs.engine.model_spec.config import ModelConfig, parse_config
from libs.engine.model_spec.matrix import DenseMatrix
from libs.engine.model_spec.plan import BatchPlan, plan_batch
from libs.engine.model_spec.rope import Rope
from libs.engine.model_spec.stored_matrix import Matrix
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.stop_flag import StepAborted, StopFlag
from tests.support.quantize import pack_int4
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

CONFIG = parse_config(TINY_CONFIG)
FORMATS = ("float32", "bfloat16", "int4", "int4_float_scale")


# All variants that this processor runs: on x86-64 one for each level from 2, elsewhere the only one.
LEVELS: list[int | None] = [*range(2, processor_level() + 1)] or [None]


def native(n_threads: int = 1, level: int | None = None) -> NativeKernels:
    return NativeKernels(load_library(level), n_threads)


@pytest.fixture(scope="module", params=[(n, LEVELS[-1]) for n in (1, 3)] + [(1, low) for low in LEVELS[:-1]])
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return native(*request.param)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(rows: int, cols: int, storage: str, seed: int = 0) -> Matrix:
    weight = normal(rows, cols, seed=seed) / cols**0.5
    if storage.startswith("int4"):
        return pack_int4(weight, 32, torch.bfloat16 if storage == "int4" else torch.float32)
    return DenseMatrix(weight.to(getattr(torch, storage)))


def close(actual: torch.Tensor, wanted: torch.Tensor, case: object = "") -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=2e-5, msg=lambda text: f"{text}\n{case}")


@pytest.mark.parametrize("storage", FORMATS)
def test_linear(kernels: NativeKernels, storage: str) -> None:
    for rows in (1, 16, 37, 96):
        weight = matrix(rows, 544, storage)
        packed, plain = kernels.pack(weight), weight.dequantised().T
        for n in (1, 2, 3, 5, 6, 7, 8, 13, 25, 130):
            x, residual = normal(n, 544, seed=1), normal(n, rows, seed=2)
            wanted = x @ plain
            close(kernels.linear(x, packed), wanted, (rows, n))
            close(kernels.linear(x, packed, residual=residual.clone()), residual + wanted, (rows, n))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 30), st.sampled_from(["float32", "bfloat16"]))
def test_linear_of_any_shape(rows: int, cols: int, n: int, storage: str) -> None:
    weight, x = matrix(rows, cols, storage), normal(n, cols, seed=1)
    close(NATIVE.linear(x, NATIVE.pack(weight)), x @ weight.dequantised().T)


def test_linear_reads_strided_rows(kernels: NativeKernels) -> None:
    weight, x = matrix(40, 64, "bfloat16"), normal(9, 100)
    close(kernels.linear(x[:, 20:84], kernels.pack(weight)), x[:, 20:84] @ weight.dequantised().T)


def test_a_group_that_is_no_multiple_of_eight_is_widened(kernels: NativeKernels) -> None:
    weight = pack_int4(normal(24, 36), 12, torch.float32)
    close(kernels.linear(normal(3, 36), kernels.pack(weight)), normal(3, 36) @ weight.dequantised().T)


GROUPED = replace(CONFIG, n_group=4, topk_group=2, norm_topk_prob=False)


@pytest.mark.parametrize("storage", FORMATS)
@pytest.mark.parametrize("config", [CONFIG, GROUPED], ids=["one_group", "four_groups"])
def test_moe(kernels: NativeKernels, storage: str, config: ModelConfig) -> None:
    def experts(width: int, seed: int) -> tuple[Matrix, Matrix, Matrix]:
        hidden = config.hidden_size
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        gate, up, down = (matrix(*shape, storage, seed + i) for i, shape in enumerate(shapes))
        return gate, up, down

    router = matrix(config.n_routed_experts, config.hidden_size, "float32", seed=5)
    bias = 0.3 * normal(config.n_routed_experts, seed=6)
    routed = [experts(config.moe_intermediate_size, 10 * e) for e in range(config.n_routed_experts)]
    for shared in (None, experts(2 * config.moe_intermediate_size, 1000)):
        both = [(k, k.pack_moe(router, bias, routed, shared, config)) for k in (kernels, TorchKernels())]
        for n in (1, 4, 40):
            x, residual = normal(n, config.hidden_size, seed=7), normal(n, config.hidden_size, seed=8)
            actual, wanted = (k.moe(x, packed, residual.clone()) for k, packed in both)
            close(actual, wanted, (n, shared is not None))


def test_moe_keeps_nan_inside_its_row(kernels: NativeKernels) -> None:
    """A row of NaN picks some expert and stays NaN; its neighbour equals a run without it."""
    gate, up, down = (matrix(*shape, "float32") for shape in ((32, 64), (32, 64), (64, 32)))
    experts = [(gate, up, down)] * 8
    packed = kernels.pack_moe(matrix(8, 64, "float32"), torch.zeros(8), experts, None, CONFIG)
    x = normal(2, 64)
    x[0] = float("nan")
    both = kernels.moe(x, packed, torch.zeros(2, 64))
    assert both[0].isnan().all()
    assert torch.equal(both[1], kernels.moe(x[1:], packed, torch.zeros(1, 64))[0])


@pytest.mark.parametrize("n", [1, 70])
@pytest.mark.parametrize("width", [3, 64, 100])
def test_rms_norm(kernels: NativeKernels, n: int, width: int) -> None:
    x, weight = normal(n, 2 * width)[:, :width], normal(width, seed=1)
    close(kernels.rms_norm(x, weight, 1e-5), TorchKernels().rms_norm(x, weight, 1e-5))


NATIVE = native()


def plan_of(config: ModelConfig, rows: list[int], contexts: list[int], kv_dtype: str) -> BatchPlan:
    """Plan sequences of `contexts` tokens with `rows` query rows each, on scattered pages of random KV."""
    block_tokens = 16
    n_blocks = [-(-context // block_tokens) for context in contexts]
    cache = PagedLatentCache(
        CacheShape(sum(n_blocks) + 3, config.n_layers, block_tokens, config.latent_width, kv_dtype)
    )
    cache.pages.copy_(normal(*cache.pages.shape, seed=3))
    free = np.random.default_rng(0).permutation(cache.shape.n_pages).tolist()
    table = np.zeros((len(rows), max(n_blocks)), np.int32)
    for line, n in zip(table, n_blocks, strict=True):
        line[:n] = [free.pop() for _ in range(n)]
    batch = ForwardBatch(
        token_ids=np.zeros(sum(rows), np.int32),
        positions=np.concatenate([np.arange(c - n, c) for n, c in zip(rows, contexts, strict=True)]),
        query_start=np.concatenate(([0], np.cumsum(rows))).astype(np.int32),
        context_len=np.array(contexts, np.int32),
        page_table=table,
        logit_rows=np.zeros(0, np.int32),
    )
    return plan_batch(batch, config, Rope(config), cache)


ODD = replace(CONFIG, n_heads=3, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=6, v_head_dim=10)
WIDE = replace(CONFIG, n_heads=20, kv_lora_rank=48)


def attend(k: Kernels, plan: BatchPlan, config: ModelConfig, q: torch.Tensor) -> torch.Tensor:
    rows = config.n_heads * (config.qk_nope_head_dim + config.v_head_dim)
    kv_b = matrix(rows, config.kv_lora_rank, "bfloat16", seed=4)
    assert isinstance(kv_b, DenseMatrix)
    return k.attend(q, k.pack_kv_b(kv_b, config), 1, plan, config)


SHAPES = {"even": CONFIG, "odd": ODD, "many_heads": WIDE}


@functools.cache
def attention_case(
    shape: str, kv_dtype: str, form: str, batch: tuple[tuple[int, int], ...]
) -> tuple[BatchPlan, torch.Tensor, torch.Tensor]:
    """A plan, queries, and what torch's kernels and every variant of the compiled ones compute."""
    rows, contexts = (list(each) for each in zip(*batch, strict=True))
    config = SHAPES[shape]
    plan = plan_of(config, rows, contexts, kv_dtype)
    everything, nothing = np.arange(len(rows), dtype=np.int32), np.zeros(0, np.int32)
    absorbed, expanded = (everything, nothing) if form == "absorbed" else (nothing, everything)
    plan = replace(plan, absorbed=absorbed, expanded=expanded)
    q = normal(plan.n_rows, config.n_heads, config.qk_head_dim, seed=9)
    return plan, q, attend(TorchKernels(), plan, config, q)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize(
    "batch",
    [((1, 1),), ((1, 700), (1, 33), (4, 1100)), ((5, 5), (130, 2200), (1, 64)), ((97, 4200),)],
    ids=["one", "decode", "mixed", "long"],
)
def test_attention(kernels: NativeKernels, form: str, batch: tuple[tuple[int, int], ...]) -> None:
    """Rows and contexts within a split, over several, and over several chunks; both forms for every batch."""
    for shape, kv_dtype in itertools.product(SHAPES, ("float32", "bfloat16")):
        plan, q, wanted = attention_case(shape, kv_dtype, form, batch)
        close(attend(kernels, plan, SHAPES[shape], q), wanted, (shape, kv_dtype))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_store_latent_and_rotate(kernels: NativeKernels, kv_dtype: str) -> None:
    rows, contexts = [40, 1, 3], [50, 7, 33]
    caches, queries = [], []
    for k in (kernels, TorchKernels()):
        plan = plan_of(CONFIG, rows, contexts, kv_dtype)
        kv_a, q = normal(plan.n_rows, CONFIG.latent_width + 5)[:, 5:], normal(plan.n_rows, 4, 24, seed=1)
        k.store_latent(kv_a, normal(CONFIG.kv_lora_rank, seed=2), 1e-6, 2, plan)
        k.rotate_queries(q, CONFIG.qk_rope_head_dim, plan.cos_sin)
        caches.append(plan.cache.pages.float())
        queries.append(q)
    torch.testing.assert_close(*caches, rtol=1e-2 if kv_dtype == "bfloat16" else 1e-5, atol=1e-5)
    close(*queries)


def row_by_row(plan: BatchPlan, row: int, sequence: int) -> BatchPlan:
    """The plan of a batch of that one row, in the same cache."""
    position = int(plan.context_len[sequence]) - (int(plan.query_start[sequence + 1]) - row)
    return replace(
        plan,
        n_rows=1,
        query_start=np.array([0, 1], np.int32),
        context_len=np.array([position + 1], np.int32),
        visible=np.array([position + 1], np.int32),
        page_table=plan.page_table[sequence : sequence + 1].copy(),
        absorbed=np.zeros(1, np.int32),
        expanded=np.zeros(0, np.int32),
    )


def check_attention_alone(k: Kernels) -> None:
    """Attention of a row beside others has the bits of that row alone."""
    plan = plan_of(WIDE, [4, 1, 3], [1300, 20, 514], "bfloat16")
    q = normal(plan.n_rows, WIDE.n_heads, WIDE.qk_head_dim, seed=9)
    together = attend(k, plan, WIDE, q)
    for sequence in range(3):
        for row in range(plan.query_start[sequence], plan.query_start[sequence + 1]):
            alone = attend(k, row_by_row(plan, row, sequence), WIDE, q[row : row + 1].clone())
            assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_row_gives_the_same_bits_alone_and_in_a_batch(n_threads: int) -> None:
    """Verify rows equal decode rows exactly, so drafts do not change the text."""
    k = native(n_threads)
    for storage in FORMATS:
        packed, x = k.pack(matrix(50, 544, storage)), normal(33, 544, seed=1)
        together = k.linear(x, packed)
        assert all(torch.equal(together[r], k.linear(x[r : r + 1], packed)[0]) for r in range(33))
    check_attention_alone(k)


def test_many_small_jobs_over_many_threads() -> None:
    """Thousands of jobs that helper threads join late or not at all: each item runs exactly once."""
    k = native(8)
    packed, x = k.pack(DenseMatrix(torch.ones(2048, 64))), torch.ones(1, 64)
    residual: Any = torch.zeros(1, 2048)
    for _ in range(2000):
        k.linear(x, packed, residual=residual)
    assert torch.equal(residual, torch.full((1, 2048), 2000.0 * 64))


@pytest.mark.parametrize("q_lora_rank", [None, 32])
@pytest.mark.parametrize("rows", [[1, 1], [4, 90, 1]])
def test_the_layer_stack_in_one_call_equals_single_calls_bitwise(
    tmp_path: Path, rows: list[int], q_lora_rank: int | None
) -> None:
    spec = RandomCheckpoint(config=TINY_CONFIG | {"q_lora_rank": q_lora_rank})
    config, k = write_random_checkpoint(tmp_path, spec), native()
    with Checkpoint(tmp_path) as checkpoint:
        weights = WeightLoader(checkpoint, config, k).load()
    answers = []
    for stack in (NativeStack(config, weights.layers, k, 1e-6), PlainStack(config, weights.layers, k, 1e-6)):
        plan = plan_of(config, rows, [n + 40 for n in rows], "float32")
        x = normal(plan.n_rows, config.hidden_size, seed=11)
        captured = stack.run(x, plan, (1, 3, 1))
        assert sorted(captured) == [1, 3]
        answers.append((x, captured[1], captured[3], plan.cache.pages))
    for one_call, plain in zip(*answers, strict=True):
        assert torch.equal(one_call, plain)


@pytest.mark.parametrize("native_stack", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("rows", [[1, 1], [4, 90, 1]])
def test_an_aborted_stack_reports_it_and_a_repeat_gives_the_same_bits(
    tmp_path: Path, rows: list[int], native_stack: bool
) -> None:
    config, k = write_random_checkpoint(tmp_path, RandomCheckpoint(config=TINY_CONFIG)), native()
    with Checkpoint(tmp_path) as checkpoint:
        layers = WeightLoader(checkpoint, config, k).load().layers
    stack = (NativeStack if native_stack else PlainStack)(config, layers, k, 1e-6)
    answers = []
    for interrupted in (False, True):
        plan = plan_of(config, rows, [n + 40 for n in rows], "float32")
        stop = StopFlag()
        if interrupted:
            stop.set()
            with pytest.raises(StepAborted):
                stack.run(normal(plan.n_rows, config.hidden_size, seed=11), plan, (), stop)
            stop.clear()
        x = normal(plan.n_rows, config.hidden_size, seed=11)
        stack.run(x, plan, (), stop)
        answers.append((x, plan.cache.pages))
    for once, again in zip(*answers, strict=True):
        assert torch.equal(once, again)


def test_another_thread_aborts_a_running_stack(tmp_path: Path) -> None:
    """With the flag set at any time, the call either completes or reports an abort."""
    config, k = write_random_checkpoint(tmp_path, RandomCheckpoint(config=TINY_CONFIG)), native()
    with Checkpoint(tmp_path) as checkpoint:
        stack = NativeStack(config, WeightLoader(checkpoint, config, k).load().layers, k, 1e-6)
    plan = plan_of(config, [300, 40], [900, 700], "float32")
    start = normal(plan.n_rows, config.hidden_size, seed=11)
    whole, stop = start.clone(), StopFlag()
    began = time.perf_counter()
    stack.run(whole, plan, (), stop)
    pass_s, cut = time.perf_counter() - began, 0
    for part in range(20):
        x = start.clone()
        timer = threading.Timer(pass_s * part / 20, stop.set)
        timer.start()
        if not part:
            timer.join()
        try:
            stack.run(x, plan, (), stop)
        except StepAborted:
            cut += 1
        else:
            assert torch.equal(x, whole)
        timer.join()
        stop.clear()
    assert cut > 0

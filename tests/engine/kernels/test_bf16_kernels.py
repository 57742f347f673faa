"""The kernels that multiply pairs of bf16 values, with each unit for them that the processor has."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.engine.transformers_peer import load_transformers
from libs.engine.kernels.library import can_use_amx, has_bf16_unit, load_library
from libs.engine.kernels.native import NativeKernels
from libs.engine.kernels.torch_kernels import TorchKernels
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.model.weights import ComputeDtype
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.stored_matrix import Matrix
from libs.engine.step.batch import ForwardBatch
from tests.engine.kernels.test_kernels import (
    CONFIG,
    ODD,
    WIDE,
    attend,
    check_attention_alone,
    matrix,
    normal,
    plan_of,
)
from tests.support.quantize import pack_int4
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

STORAGES = ("bfloat16", "int4", "int4_float_scale")
KernelsOf = Callable[[int], NativeKernels]  # by the number of threads


@pytest.fixture(
    params=[
        pytest.param(
            "avx512_bf16",
            marks=pytest.mark.skipif(not has_bf16_unit(), reason="the processor lacks AVX512_BF16"),
        ),
        pytest.param(
            "auto",
            marks=pytest.mark.skipif(not can_use_amx(), reason="the processor lacks AMX_BF16"),
            id="amx",
        ),
    ]
)
def compute_dtype(request: pytest.FixtureRequest) -> ComputeDtype:
    """The option that chooses the unit."""
    chosen: ComputeDtype = request.param
    return chosen


@pytest.fixture
def kernels_of(compute_dtype: ComputeDtype) -> KernelsOf:
    library = load_library(bf16=True, amx=compute_dtype == "auto")
    return lambda n_threads: NativeKernels(library, n_threads)


def narrowed_product(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """What a product of pairs is: x rounded to bf16, all else exact."""
    return (x.bfloat16().double() @ weight.dequantised().double().T).float()


def relative_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("rows", [16, 37])
@pytest.mark.parametrize("n", [1, 3, 13, 130])
def test_a_product_rounds_its_input_and_nothing_else(
    kernels_of: KernelsOf, storage: str, rows: int, n: int
) -> None:
    k, weight, x = kernels_of(2), matrix(rows, 544, storage), normal(n, 544, seed=1)
    residual, packed = normal(n, rows, seed=2), k.pack(weight)
    wanted = narrowed_product(x, weight)
    torch.testing.assert_close(k.linear(x, packed), wanted, rtol=1e-4, atol=5e-5)
    added = k.linear(x, packed, residual=residual.clone())
    torch.testing.assert_close(added, residual + wanted, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("cols", [1, 2, 31, 1101])
def test_odd_columns_are_multiplied_too(kernels_of: KernelsOf, cols: int) -> None:
    k, weight, x = kernels_of(1), matrix(33, cols, "bfloat16"), normal(30, cols, seed=1)
    torch.testing.assert_close(k.linear(x, k.pack(weight)), narrowed_product(x, weight), rtol=1e-4, atol=5e-5)


def test_fp32_weights_are_multiplied_in_fp32(kernels_of: KernelsOf) -> None:
    k, weight, x = kernels_of(1), matrix(40, 544, "float32"), normal(20, 544, seed=1)
    torch.testing.assert_close(k.linear(x, k.pack(weight)), x @ weight.dequantised().T, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("n", [1, 4, 40])
def test_experts_agree_with_the_reference_within_bf16(kernels_of: KernelsOf, storage: str, n: int) -> None:
    hidden, inner = CONFIG.hidden_size, CONFIG.moe_intermediate_size
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))

    def mlp(seed: int) -> tuple[Matrix, Matrix, Matrix]:
        gate, up, down = (matrix(*shape, storage, seed + i) for i, shape in enumerate(shapes))
        return gate, up, down

    router = matrix(CONFIG.n_routed_experts, hidden, "float32", seed=5)
    routed = [mlp(10 * expert) for expert in range(CONFIG.n_routed_experts)]
    x, bias = normal(n, hidden, seed=7), 0.3 * normal(CONFIG.n_routed_experts, seed=6)
    answers = [
        k.moe(x, k.pack_moe(router, bias, routed, mlp(1000), CONFIG), torch.zeros(n, hidden))
        for k in (kernels_of(2), TorchKernels())
    ]
    assert 0 < relative_error(*answers) < 1e-2


@pytest.mark.parametrize("config", [CONFIG, WIDE, replace(WIDE, v_head_dim=10)], ids=["even", "wide", "v10"])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize(
    ("rows", "contexts"),
    [([1], [1]), ([1, 1, 4], [700, 33, 1100]), ([5, 130], [5, 2200])],
)
def test_attention_agrees_with_the_reference_within_bf16(
    kernels_of: KernelsOf, config: ModelConfig, form: str, rows: list[int], contexts: list[int]
) -> None:
    plan = plan_of(config, rows, contexts, "bfloat16")
    everything, nothing = np.arange(len(rows), dtype=np.int32), np.zeros(0, np.int32)
    absorbed, expanded = (everything, nothing) if form == "absorbed" else (nothing, everything)
    plan = replace(plan, absorbed=absorbed, expanded=expanded)
    q = normal(plan.n_rows, config.n_heads, config.qk_head_dim, seed=9)
    error = relative_error(attend(kernels_of(2), plan, config, q), attend(TorchKernels(), plan, config, q))
    assert 0 < error < 2e-2


def test_attention_over_an_fp32_cache_stays_fp32(kernels_of: KernelsOf) -> None:
    plan = plan_of(CONFIG, [1, 140], [90, 300], "float32")
    plan = replace(plan, absorbed=np.zeros(0, np.int32), expanded=np.arange(2, dtype=np.int32))
    q = normal(plan.n_rows, CONFIG.n_heads, CONFIG.qk_head_dim, seed=9)
    found, wanted = (attend(k, plan, CONFIG, q) for k in (kernels_of(1), TorchKernels()))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)


def test_parts_of_an_odd_width_are_multiplied_in_fp32(kernels_of: KernelsOf) -> None:
    """No pair may join the last value of one part with the first value of the next."""
    config = replace(ODD, qk_nope_head_dim=13)
    plan = plan_of(config, [40], [300], "bfloat16")
    plan = replace(plan, absorbed=np.zeros(0, np.int32), expanded=np.zeros(1, np.int32))
    q = normal(plan.n_rows, config.n_heads, config.qk_head_dim, seed=9)
    found, wanted = (attend(k, plan, config, q) for k in (kernels_of(1), TorchKernels()))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_row_gives_the_same_bits_alone_and_in_a_batch(kernels_of: KernelsOf, n_threads: int) -> None:
    """Verify rows equal decode rows exactly, so drafts do not change the text."""
    k = kernels_of(n_threads)
    for storage in STORAGES:
        packed, x = k.pack(matrix(50, 544, storage)), normal(133, 544, seed=1)
        together = k.linear(x, packed)
        for end in (1, 2, 5, 14, 40):
            assert torch.equal(together[:end], k.linear(x[:end], packed))
    check_attention_alone(k)


@pytest.mark.parametrize("group", [16, 32, 64, 96])
def test_groups_of_any_size_are_scaled(kernels_of: KernelsOf, group: int) -> None:
    """Those that a tile does not divide take another path."""
    weight = pack_int4(normal(40, 12 * group) / group, group, torch.bfloat16)
    x, k = normal(21, 12 * group, seed=1), kernels_of(1)
    found, alone = (k.linear(rows, k.pack(weight)) for rows in (x, x[:3]))
    torch.testing.assert_close(found, narrowed_product(x, weight), rtol=1e-4, atol=1e-4)
    assert torch.equal(found[:3], alone)


@pytest.mark.parametrize(("gate", "up"), list(itertools.permutations([0, 16, 32], 2)))
@pytest.mark.parametrize("n", [3, 21])
def test_gate_and_up_may_have_groups_of_other_sizes(
    kernels_of: KernelsOf, n: int, gate: int, up: int
) -> None:
    """A tile may divide the groups of one of the two alone. 0 stands for bf16."""
    hidden, inner = 192, 40

    def weight(group: int, rows: int, cols: int) -> Matrix:
        dense = matrix(rows, cols, "bfloat16")
        return pack_int4(dense.dequantised(), group, torch.bfloat16) if group else dense

    mlp = weight(gate, inner, hidden), weight(up, inner, hidden), weight(0, hidden, inner)
    x = normal(n, hidden, seed=1)
    answers = [k.mlp(x, k.pack_mlp(mlp), torch.zeros(n, hidden)) for k in (kernels_of(1), TorchKernels())]
    assert relative_error(*answers) < 1e-2


def test_other_users_of_the_unit_work_between_products(kernels_of: KernelsOf) -> None:
    """The kernels release the unit, whose layout torch sets up for itself."""
    k, weight, x = kernels_of(2), matrix(64, 544, "bfloat16"), normal(40, 544, seed=1)
    packed, a = k.pack(weight), normal(96, 96).bfloat16()
    first, wanted = k.linear(x, packed), a.float() @ a.float()
    for _ in range(3):
        torch.testing.assert_close((a @ a).float(), wanted, rtol=2e-2, atol=2e-1)
        assert torch.equal(k.linear(x, packed), first)


def logits_of(
    model_dir: Path, ids: np.ndarray, compute_dtype: ComputeDtype, parts: list[int]
) -> torch.Tensor:
    """Logits of all positions, computed in steps of so many rows."""
    runner = ModelRunner.load(model_dir, RunnerOptions(n_pages=8, compute_dtype=compute_dtype, threads=1))
    answers, start = [], 0
    for n in parts:
        batch = ForwardBatch(
            token_ids=ids[start : start + n].astype(np.int32),
            positions=np.arange(start, start + n, dtype=np.int32),
            query_start=np.array([0, n], np.int32),
            context_len=np.array([start + n], np.int32),
            page_table=np.arange(8, dtype=np.int32)[None],
            logit_rows=np.arange(n, dtype=np.int32),
        )
        answers.append(runner.forward(batch).logits)
        start += n
    return torch.cat(answers)


def divergence(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """The mean KL divergence of the distributions from the wanted ones."""
    log_p, log_q = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def test_the_model_is_nearer_to_fp64_than_bf16_of_transformers(
    tmp_path: Path, compute_dtype: ComputeDtype
) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint(config=TINY_CONFIG))
    ids = np.random.default_rng(1).integers(0, TINY_CONFIG["vocab_size"], 200)
    with torch.inference_mode():
        exact = load_transformers(tmp_path, torch.float64)
        exact.config._experts_implementation = "eager"  # torch's grouped products have no fp64
        wanted = exact(torch.from_numpy(ids)[None]).logits[0]
        theirs = load_transformers(tmp_path, torch.bfloat16)(torch.from_numpy(ids)[None]).logits[0]
    whole = divergence(wanted, logits_of(tmp_path, ids, compute_dtype, [200]))
    steps = logits_of(tmp_path, ids, compute_dtype, [150] + [1] * 50)
    assert torch.equal(steps, logits_of(tmp_path, ids, compute_dtype, [150] + [5] * 10))
    assert not torch.equal(steps, logits_of(tmp_path, ids, "float32", [150] + [1] * 50))
    assert 0 < max(whole, divergence(wanted, steps)) < divergence(wanted, theirs)

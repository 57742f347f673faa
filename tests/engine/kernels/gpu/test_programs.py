"""The Triton programs in the interpreter against their torch twins, over odd shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from libs.engine.kernels.gpu.device_plan import upload
from libs.engine.kernels.gpu.expert_weights import repack_int4, stack_experts
from libs.engine.kernels.gpu.grouped_gemm import grouped_gemm
from libs.engine.kernels.gpu.mla_decode import choose_split_tokens, mla_decode
from libs.engine.kernels.gpu.mla_prefill import mla_prefill
from libs.engine.kernels.gpu.norm import rms_norm, swiglu
from libs.engine.kernels.gpu.rope import rotate_queries, store_latent
from libs.engine.kernels.gpu.router import choose_experts
from libs.engine.kernels.gpu.triton_kernels import TritonKernels
from libs.engine.kernels.gpu.work_list import FEW_PAIRS, build_work_list, single_list
from libs.engine.kernels.torch_kernels import TorchKernels
from libs.engine.model_spec.matrix import DenseMatrix, pack_int4
from libs.engine.model_spec.moe import route
from libs.engine.model_spec.stored_matrix import Matrix
from tests.engine.kernels.test_kernels import CONFIG, ODD, normal, plan_of

CPU = torch.device("cpu")


def close(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def head_weights(seed: int = 4) -> DenseMatrix:
    rows = ODD.n_heads * (ODD.qk_nope_head_dim + ODD.v_head_dim)
    return DenseMatrix(normal(rows, ODD.kv_lora_rank, seed=seed) / ODD.kv_lora_rank**0.5)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("split_tokens", [64, 128, 1024])
def test_decode_over_splits(kv_dtype: str, split_tokens: int) -> None:
    """1, 8 and 3 rows over one, some and many splits; a split may lie behind what the first rows see."""
    plan = plan_of(ODD, [1, 8, 3], [1, 130, 195], kv_dtype)
    everything = np.arange(3, dtype=np.int32)
    plan = replace(plan, absorbed=everything, expanded=everything[:0])
    q = normal(plan.n_rows, ODD.n_heads, ODD.qk_head_dim, seed=9)
    kernels, twin = TritonKernels(CPU, torch.float32), TorchKernels()
    kv_b = kernels.pack_kv_b(head_weights(), ODD)
    nope = ODD.qk_nope_head_dim
    folded = torch.einsum("thd,hdl->thl", q[..., :nope], kv_b.uk)
    mixed = mla_decode(
        folded.contiguous(),
        q[..., nope:],
        plan.cache.pages[:, 1],
        upload(plan, CPU),
        most_rows=8,
        longest=195,
        split_tokens=split_tokens,
        scale=ODD.softmax_scale,
    )
    actual = torch.einsum("thl,hvl->thv", mixed, kv_b.uv).flatten(1)
    close(actual, twin.attend(q, twin.pack_kv_b(head_weights(), ODD), 1, plan, ODD))


@pytest.mark.parametrize(("rows", "context", "chunk"), [(1, 1, 64), (5, 70, 32), (37, 37, 16384)])
def test_prefill_in_chunks(rows: int, context: int, chunk: int) -> None:
    plan = plan_of(ODD, [rows], [context], "float32")
    one = np.zeros(1, np.int32)
    plan = replace(plan, absorbed=one[:0], expanded=one)
    q = normal(rows, ODD.n_heads, ODD.qk_head_dim, seed=9)
    latents = plan.cache.pages[:, 1][torch.from_numpy(plan.page_table[0])].flatten(0, 1)[:context]
    actual = mla_prefill(
        q,
        latents,
        head_weights().weight,
        nope=ODD.qk_nope_head_dim,
        value=ODD.v_head_dim,
        scale=ODD.softmax_scale,
        chunk_tokens=chunk,
    )
    twin = TorchKernels()
    close(actual.flatten(1), twin.attend(q, twin.pack_kv_b(head_weights(), ODD), 1, plan, ODD))


@pytest.mark.parametrize("width", [3, 100])
def test_norm_behind_the_residual(width: int) -> None:
    x, delta, weight = normal(3, 2 * width)[:, :width], normal(3, width, seed=1), normal(width, seed=2)
    wanted_sum = x + delta
    close(rms_norm(x, weight, 1e-5, torch.float32, delta), TorchKernels().rms_norm(wanted_sum, weight, 1e-5))
    close(x, wanted_sum)
    close(rms_norm(x, weight, 1e-5, torch.float32), TorchKernels().rms_norm(x, weight, 1e-5))


def test_swiglu() -> None:
    joined = normal(3, 74)
    close(swiglu(joined), torch.nn.functional.silu(joined[:, :37]) * joined[:, 37:])


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_rope_and_latent_write(kv_dtype: str) -> None:
    plans = [plan_of(ODD, [4, 1], [20, 7], kv_dtype) for _ in range(2)]
    kv_a, norm = normal(5, ODD.latent_width + 5)[:, 5:], normal(ODD.kv_lora_rank, seed=2)
    queries = [normal(5, ODD.n_heads, ODD.qk_head_dim, seed=1) for _ in range(2)]
    store_latent(kv_a, norm, 1e-6, plans[0].cache.pages[:, 2], upload(plans[0], CPU))
    rotate_queries(queries[0], ODD.qk_rope_head_dim, plans[0].cos_sin)
    TorchKernels().store_latent(kv_a, norm, 1e-6, 2, plans[1])
    TorchKernels().rotate_queries(queries[1], ODD.qk_rope_head_dim, plans[1].cos_sin)
    close(queries[0], queries[1])
    # The interpreter cuts fp32 to bf16 instead of rounding it: one step of bf16 apart.
    close(plans[0].cache.pages, plans[1].cache.pages, 2**-7 if kv_dtype == "bfloat16" else 2e-5)


@pytest.mark.parametrize(("n_experts", "n_group", "topk_group", "n_chosen"), [(12, 4, 2, 3), (21, 1, 1, 5)])
@pytest.mark.parametrize("normalises", [True, False])
def test_router(n_experts: int, n_group: int, topk_group: int, n_chosen: int, normalises: bool) -> None:
    config = replace(
        CONFIG,
        n_routed_experts=n_experts,
        n_group=n_group,
        topk_group=topk_group,
        experts_per_token=n_chosen,
        norm_topk_prob=normalises,
    )
    logits, bias = normal(6, n_experts, seed=3), 0.3 * normal(n_experts, seed=4)
    ids, weights = choose_experts(
        logits,
        bias,
        n_chosen=n_chosen,
        n_group=n_group,
        topk_group=topk_group,
        normalises=normalises,
        scaling=config.routed_scaling_factor,
    )
    wanted_ids, wanted_weights = route(logits, bias, config)
    assert torch.equal(ids.long(), wanted_ids)
    close(weights, wanted_weights)


def test_a_row_of_nan_is_routed_to_distinct_experts() -> None:
    ids, weights = choose_experts(
        torch.full((1, 6), float("nan")),
        torch.zeros(6),
        n_chosen=3,
        n_group=1,
        topk_group=1,
        normalises=True,
        scaling=1.0,
    )
    assert len(set(ids[0].tolist())) == 3 and int(ids.min()) >= 0 and int(ids.max()) < 6
    assert weights.isnan().all()


def experts_of(storage: str, n: int, rows: int, cols: int) -> list[Matrix]:
    weights = [normal(rows, cols, seed=e) / cols**0.5 for e in range(n)]
    return [pack_int4(w, 32, torch.bfloat16) if storage == "int4" else DenseMatrix(w) for w in weights]


@pytest.mark.parametrize("storage", ["int4", "dense"])
@pytest.mark.parametrize("cols", [96, 288])
def test_grouped_product(storage: str, cols: int) -> None:
    """Columns in one block of words and in two, with a ragged end; a row tile with a ragged end."""
    experts = experts_of(storage, 3, 70, cols)
    x, chosen = normal(4, cols, seed=8), torch.tensor([2, 0, -1, 1, 2, -1, 0, 2], dtype=torch.int32)
    weight = normal(8, seed=9)
    stacked = stack_experts([[m] for m in experts], CPU, torch.float32)
    actual = grouped_gemm(
        x,
        stacked,
        build_work_list(chosen, 3),
        pairs_per_row=2,
        pair_weight=weight,
        out_dtype=torch.float32,
    )
    for pair, expert in enumerate(chosen.tolist()):
        if expert >= 0:
            wanted = weight[pair] * (x[pair // 2] @ experts[expert].dequantised().T)
            close(actual[pair], wanted, 1e-4)


@pytest.mark.parametrize("storage", ["int4", "dense"])
def test_gated_product(storage: str) -> None:
    gate, up = experts_of(storage, 2, 40, 64)
    x = normal(3, 64, seed=8)
    stacked = stack_experts([(gate, up)], CPU, torch.float32)
    actual = grouped_gemm(x, stacked, single_list(3, CPU), is_gated=True, out_dtype=torch.float32)
    wanted = torch.nn.functional.silu(x @ gate.dequantised().T) * (x @ up.dequantised().T)
    close(actual, wanted, 1e-4)


@pytest.mark.parametrize("storage", ["int4", "dense"])
def test_a_linear_and_an_mlp_of_either_storage(storage: str) -> None:
    gate, up = experts_of(storage, 2, 40, 64)
    down = experts_of(storage, 1, 64, 64 if storage == "dense" else 32)[0]
    x, residual = normal(3, 64, seed=8), normal(3, 40, seed=9)
    kernels, twin = TritonKernels(CPU, torch.float32), TorchKernels()
    answers = [k.linear(x, k.pack(gate), residual.clone()) for k in (kernels, twin)]
    close(answers[0], answers[1], 1e-4)
    close(kernels.logits(x, kernels.pack(up)), twin.linear(x, twin.pack(up)), 1e-4)
    wide = experts_of(storage, 2, down.cols, 64)
    outputs = [k.mlp(x, k.pack_mlp((wide[0], wide[1], down)), x.clone()) for k in (kernels, twin)]
    close(outputs[0], outputs[1], 1e-4)


def test_repacked_nibbles_have_one_group_a_shift() -> None:
    matrix = pack_int4(normal(3, 288), 32, torch.float32)
    words, scale = repack_int4(matrix)
    values = torch.stack([(words.view(3, 2, 32) >> (4 * i)) & 0xF for i in range(8)], dim=2) - 8
    widened = values.view(3, 16, 32) * scale.T[:, :, None]
    assert torch.equal(widened.view(3, 512)[:, :288], matrix.dequantised())
    assert not widened.view(3, 512)[:, 288:].any()


@pytest.mark.parametrize("n_pairs", [1, FEW_PAIRS, FEW_PAIRS + 1, 1000])
def test_the_work_list_has_every_held_pair_once(n_pairs: int) -> None:
    expert_of_pair = torch.randint(-1, 7, (n_pairs,), generator=torch.Generator().manual_seed(1)).int()
    work = build_work_list(expert_of_pair, 7)
    seen: list[int] = []
    for item in range(int(work.n_items)):
        first, count = int(work.first[item]), int(work.count[item])
        assert count <= work.block
        pairs = work.order[first : first + count].tolist()
        assert all(expert_of_pair[pair] == work.expert[item] for pair in pairs)
        seen += pairs
    assert sorted(seen) == [p for p, e in enumerate(expert_of_pair.tolist()) if e >= 0]


def test_splits_are_whole_blocks_and_fill_the_device() -> None:
    assert choose_split_tokens(100, 1, 132) == 256
    assert choose_split_tokens(32768, 1, 132) == 256
    assert choose_split_tokens(32768, 64, 132) == 16384
    assert choose_split_tokens(32768, 1000, 132) == 32768

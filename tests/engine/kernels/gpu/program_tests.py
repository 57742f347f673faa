"""Tests of the Triton programs against their torch twins, over odd shapes and those of Kimi-K2.5.

The interpreter's file and tests/gpu run the same ones: each has a fixture `target`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from libs.engine.kernels.torch_kernels import TorchKernels
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.matrix import DenseMatrix
from libs.engine.model_spec.moe import route
from libs.engine.model_spec.plan import BatchPlan
from libs.engine.model_spec.stored_matrix import Matrix
from tests.engine.kernels.gpu.program_target import ProgramTarget
from tests.engine.kernels.test_kernels import CONFIG, ODD, normal, plan_of
from tests.support.quantize import pack_int4

# The heads and widths of Kimi-K2.5: 64 query vectors a row, latents of 512 + 64.
WIDE_HEADS = replace(
    CONFIG, n_heads=64, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
TWIN = TorchKernels()


def head_weights(target: ProgramTarget, config: ModelConfig) -> DenseMatrix:
    rows = config.n_heads * (config.qk_nope_head_dim + config.v_head_dim)
    weight = normal(rows, config.kv_lora_rank, seed=4) / config.kv_lora_rank**0.5
    return DenseMatrix(weight.to(target.dtype).float())


def attended(target: ProgramTarget, q: torch.Tensor, plan: BatchPlan, config: ModelConfig) -> torch.Tensor:
    """The twin's attention over layer 1."""
    return TWIN.attend(q, TWIN.pack_kv_b(head_weights(target, config), config), 1, plan, config)


def experts_of(target: ProgramTarget, storage: str, n: int, rows: int, cols: int) -> list[Matrix]:
    weights = [(normal(rows, cols, seed=e) / cols**0.5).to(target.dtype).float() for e in range(n)]
    return [pack_int4(w, 32, torch.bfloat16) if storage == "int4" else DenseMatrix(w) for w in weights]


class AttentionTests:
    @staticmethod
    def check_decode(
        target: ProgramTarget,
        config: ModelConfig,
        plan: BatchPlan,
        split_tokens: int,
    ) -> None:
        """All sequences in the absorbed form, against the twin."""
        p, nope = target.programs, config.qk_nope_head_dim
        everything = np.arange(len(plan.context_len), dtype=np.int32)
        plan = replace(plan, absorbed=everything, expanded=everything[:0])
        q = target.values(plan.n_rows, config.n_heads, config.qk_head_dim, seed=9)
        kv_b = p.TritonKernels(target.device, target.dtype).pack_kv_b(head_weights(target, config), config)
        queries = target.put(q)
        folded = torch.einsum("thd,hdl->thl", queries[..., :nope], kv_b.uk)
        mixed = p.mla_decode(
            folded.contiguous(),
            queries[..., nope:],
            target.on(plan.cache.pages[:, 1]),
            p.upload(plan, target.device),
            p.upload_splits(plan, np.full(len(everything), split_tokens, np.int32), target.device),
            scale=config.softmax_scale,
        )
        actual = torch.einsum("thl,hvl->thv", mixed, kv_b.uv).flatten(1)
        target.close(actual, attended(target, q, plan, config), 5e-5)

    @pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("split_tokens", [64, 128, 1024])
    def test_decode_over_splits(self, target: ProgramTarget, kv_dtype: str, split_tokens: int) -> None:
        """1, 8 and 3 rows over one, some and many splits; a split may lie behind what first rows see."""
        if target.dtype == torch.bfloat16 and kv_dtype == "float32":
            pytest.skip("bf16 queries have bf16 KV")
        self.check_decode(target, ODD, plan_of(ODD, [1, 8, 3], [1, 130, 195], kv_dtype), split_tokens)

    @pytest.mark.parametrize("rows", range(1, 9))
    def test_decode_of_64_heads_and_512_wide_latents(self, target: ProgramTarget, rows: int) -> None:
        """A decode row, and up to seven drafts with it."""
        contexts = [rows + 16, 70]
        plan = plan_of(WIDE_HEADS, [rows, 1], contexts, "bfloat16")
        self.check_decode(target, WIDE_HEADS, plan, 64)

    @pytest.mark.parametrize("config", [ODD, WIDE_HEADS], ids=["odd", "wide"])
    @pytest.mark.parametrize(("rows", "context", "chunk"), [(1, 1, 64), (5, 70, 32), (37, 37, 16384)])
    def test_prefill_in_chunks(
        self, target: ProgramTarget, config: ModelConfig, rows: int, context: int, chunk: int
    ) -> None:
        plan = plan_of(config, [rows], [context], str(target.dtype).removeprefix("torch."))
        one = np.zeros(1, np.int32)
        plan = replace(plan, absorbed=one[:0], expanded=one)
        q = target.values(rows, config.n_heads, config.qk_head_dim, seed=9)
        latents = plan.cache.pages[:, 1][torch.from_numpy(plan.page_table[0])].flatten(0, 1)[:context]
        actual = target.programs.mla_prefill(
            target.put(q),
            target.put(latents),
            target.put(head_weights(target, config).weight),
            nope=config.qk_nope_head_dim,
            value=config.v_head_dim,
            scale=config.softmax_scale,
            chunk_tokens=chunk,
        )
        target.close(actual.flatten(1), attended(target, q, plan, config), 5e-5)

    @pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("config", [ODD, WIDE_HEADS], ids=["odd", "wide"])
    def test_rope_and_latent_write(self, target: ProgramTarget, config: ModelConfig, kv_dtype: str) -> None:
        p = target.programs
        plan, wanted = (plan_of(config, [4, 1], [20, 7], kv_dtype) for _ in range(2))
        kv_a, norm = target.values(5, config.latent_width + 5), normal(config.kv_lora_rank, seed=2)
        queries = target.values(5, config.n_heads, config.qk_head_dim, seed=1)
        pages, rotated, uploaded = (
            target.on(plan.cache.pages),
            target.put(queries),
            p.upload(plan, target.device),
        )
        p.store_latent(target.put(kv_a)[:, 5:], target.on(norm), 1e-6, pages[:, 2], uploaded)
        p.rotate_queries(rotated, config.qk_rope_head_dim, uploaded.cos_sin)
        TWIN.store_latent(kv_a[:, 5:], norm, 1e-6, 2, wanted)
        TWIN.rotate_queries(queries, config.qk_rope_head_dim, wanted.cos_sin)
        target.close(rotated, queries)
        # The interpreter cuts fp32 to bf16 instead of rounding it: one step of bf16 apart.
        target.close(pages, wanted.cache.pages, 2**-7 if kv_dtype == "bfloat16" else 2e-5)


class RowTests:
    @pytest.mark.parametrize("width", [3, 100, 7168])
    def test_norm_behind_the_residual(self, target: ProgramTarget, width: int) -> None:
        norm, weight = target.programs.rms_norm, normal(width, seed=2)
        x, delta = normal(3, 2 * width)[:, :width], target.values(3, width, seed=1)
        stream = target.on(x)
        actual = norm(stream, target.on(weight), 1e-5, target.dtype, target.put(delta))
        target.close(actual, TWIN.rms_norm(x + delta, weight, 1e-5))
        torch.testing.assert_close(stream.cpu(), x + delta, rtol=1e-6, atol=1e-6)
        target.close(
            norm(target.on(x), target.on(weight), 1e-5, target.dtype), TWIN.rms_norm(x, weight, 1e-5)
        )

    @pytest.mark.parametrize("width", [37, 2048])
    def test_swiglu(self, target: ProgramTarget, width: int) -> None:
        joined = target.values(3, 2 * width)
        wanted = torch.nn.functional.silu(joined[:, :width]) * joined[:, width:]
        target.close(target.programs.swiglu(target.put(joined)), wanted)

    @pytest.mark.parametrize(
        ("n_experts", "n_group", "topk_group", "n_chosen"), [(12, 4, 2, 3), (21, 1, 1, 5), (384, 1, 1, 8)]
    )
    @pytest.mark.parametrize("normalises", [True, False])
    def test_router(
        self,
        target: ProgramTarget,
        n_experts: int,
        n_group: int,
        topk_group: int,
        n_chosen: int,
        normalises: bool,
    ) -> None:
        config = replace(
            CONFIG,
            n_routed_experts=n_experts,
            n_group=n_group,
            topk_group=topk_group,
            experts_per_token=n_chosen,
            norm_topk_prob=normalises,
        )
        logits, bias = normal(6, n_experts, seed=3), 0.3 * normal(n_experts, seed=4)
        ids, weights = target.programs.choose_experts(
            target.on(logits),
            target.on(bias),
            n_chosen=n_chosen,
            n_group=n_group,
            topk_group=topk_group,
            normalises=normalises,
            scaling=config.routed_scaling_factor,
        )
        wanted_ids, wanted_weights = route(logits, bias, config)
        assert torch.equal(ids.cpu().long(), wanted_ids)
        torch.testing.assert_close(weights.cpu(), wanted_weights, rtol=2e-5, atol=2e-5)

    def test_a_row_of_nan_is_routed_to_distinct_experts(self, target: ProgramTarget) -> None:
        ids, weights = target.programs.choose_experts(
            torch.full((1, 6), float("nan"), device=target.device),
            torch.zeros(6, device=target.device),
            n_chosen=3,
            n_group=1,
            topk_group=1,
            normalises=True,
            scaling=1.0,
        )
        assert len(set(ids[0].tolist())) == 3 and int(ids.min()) >= 0 and int(ids.max()) < 6
        assert weights.isnan().all()


class ProductTests:
    @pytest.mark.parametrize("storage", ["int4", "dense"])
    @pytest.mark.parametrize("cols", [96, 288])
    def test_grouped_product(self, target: ProgramTarget, storage: str, cols: int) -> None:
        """Columns in one block of words and in two, with a ragged end; a row tile with a ragged end."""
        p, experts = target.programs, experts_of(target, storage, 3, 70, cols)
        x, chosen = (
            target.values(4, cols, seed=8),
            torch.tensor([2, 0, -1, 1, 2, -1, 0, 2], dtype=torch.int32),
        )
        weight = normal(8, seed=9)
        actual = p.grouped_gemm(
            target.put(x),
            p.stack_experts([[m] for m in experts], target.device, target.dtype),
            p.build_work_list(target.on(chosen), 3),
            pairs_per_row=2,
            pair_weight=target.on(weight),
            out_dtype=torch.float32,
        )
        held = chosen >= 0
        wanted = torch.stack(
            [
                weight[pair] * (x[pair // 2] @ experts[expert].dequantised().T)
                for pair, expert in enumerate(chosen.tolist())
                if expert >= 0
            ]
        )
        target.close(actual.cpu()[held], wanted, 1e-4)

    @pytest.mark.parametrize("storage", ["int4", "dense"])
    @pytest.mark.parametrize("n_tokens", [1, 43, 300])
    def test_experts_and_their_sum(self, target: ProgramTarget, storage: str, n_tokens: int) -> None:
        """A pair an item, then sorted tiles of 16 and of 64 pairs; an expert in seven pairs is not held."""
        p, n_chosen = target.programs, 3
        experts, shared = experts_of(target, storage, 6, 70, 96), target.values(n_tokens, 70, seed=5)
        x, residual = target.values(n_tokens, 96, seed=8), normal(n_tokens, 70, seed=7)
        scores = torch.rand(n_tokens, 7, generator=torch.Generator().manual_seed(1))
        chosen = scores.topk(n_chosen).indices.int() - 1
        weight = torch.rand(n_tokens, n_chosen, generator=torch.Generator().manual_seed(2))
        pairs = target.on(chosen.flatten())
        parts = p.grouped_gemm(
            target.put(x),
            p.stack_experts([[m] for m in experts], target.device, target.dtype),
            p.build_work_list(pairs, 6),
            pairs_per_row=n_chosen,
            pair_weight=target.on(weight.flatten()),
            out_dtype=torch.float32,
        )
        total = target.on(residual)
        p.combine(parts, pairs, target.put(shared), total)
        weights_of_all = torch.zeros(n_tokens, 7).scatter_(1, chosen.long() + 1, weight)[:, 1:]
        products = torch.stack([x @ expert.dequantised().T for expert in experts], dim=1)
        wanted = residual + shared + (products * weights_of_all[:, :, None]).sum(1)
        target.close(total, wanted, 1e-4)

    @pytest.mark.parametrize("storage", ["int4", "dense"])
    def test_gated_product(self, target: ProgramTarget, storage: str) -> None:
        p = target.programs
        gate, up = experts_of(target, storage, 2, 40, 64)
        x = target.values(3, 64, seed=8)
        stacked = p.stack_experts([(gate, up)], target.device, target.dtype)
        work = p.single_list(3, target.device)
        actual = p.grouped_gemm(target.put(x), stacked, work, is_gated=True, out_dtype=torch.float32)
        wanted = torch.nn.functional.silu(x @ gate.dequantised().T) * (x @ up.dequantised().T)
        target.close(actual, wanted, 1e-4)

    @pytest.mark.parametrize("storage", ["int4", "dense"])
    def test_a_linear_and_an_mlp_of_either_storage(self, target: ProgramTarget, storage: str) -> None:
        gate, up = experts_of(target, storage, 2, 40, 64)
        down = experts_of(target, storage, 1, 64, 64 if storage == "dense" else 32)[0]
        x, residual = target.values(3, 64, seed=8), normal(3, 40, seed=9)
        kernels = target.programs.TritonKernels(target.device, target.dtype)
        on_device = target.put(x)
        target.close(
            kernels.linear(on_device, kernels.pack(gate), target.on(residual)),
            TWIN.linear(x, TWIN.pack(gate), residual.clone()),
            1e-4,
        )
        target.close(kernels.logits(on_device, kernels.pack(up)), TWIN.linear(x, TWIN.pack(up)), 1e-4)
        first, second = experts_of(target, storage, 2, down.cols, 64)
        mlp = kernels.mlp(on_device, kernels.pack_mlp((first, second, down)), target.on(x))
        target.close(mlp, TWIN.mlp(x, TWIN.pack_mlp((first, second, down)), x.clone()), 1e-4)

"""Attention over shares of the positions, merged, against attention over whole contexts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.kernels.interface import ShareKernels
from libs.engine.kernels.torch_kernels import TorchKernels
from libs.engine.kv.cache import PagedLatentCache
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.kv_share import KvShare
from libs.engine.model_spec.matrix import DenseMatrix
from libs.engine.model_spec.plan import BatchPlan
from tests.engine.kernels.test_kernels import CONFIG, ODD, attend, close, matrix, native, normal, plan_of

BLOCK_TOKENS = 16
# Decode rows, drafts, prompts; a context of one token, one of a page, several splits and several chunks.
BATCHES = [([1, 4, 1], [1, 700, 16]), ([5, 130, 1], [5, 2200, 64]), ([3, 9], [3, 9])]


@given(st.lists(st.integers(0, 100), min_size=1), st.sampled_from([1, 2, 4, 8, 16]))
def test_shares_divide_every_context(lengths: list[int], parts: int) -> None:
    shares = [KvShare(part, parts) for part in range(parts)]
    counts = [share.count(np.array(lengths, np.int32), BLOCK_TOKENS) for share in shares]
    assert np.sum(counts, axis=0).tolist() == lengths
    for share in shares:
        held = share.holds(np.arange(100, dtype=np.int32) % BLOCK_TOKENS, BLOCK_TOKENS)
        expected = [int(held[:length].sum()) for length in lengths]
        assert share.count(np.array(lengths, np.int32), BLOCK_TOKENS).tolist() == expected
    largest, smallest = np.max(counts, axis=0), np.min(counts, axis=0)
    assert (largest - smallest).max() <= BLOCK_TOKENS // parts


def plan_of_share(plan: BatchPlan, share: KvShare) -> BatchPlan:
    """The plan over a cache in which all other slots are NaN."""
    cache = PagedLatentCache(plan.cache.shape)
    slots = share.slots(BLOCK_TOKENS)
    cache.pages.fill_(float("nan"))
    cache.pages[:, :, slots] = plan.cache.pages[:, :, slots]
    return replace(
        plan,
        cache=cache,
        share=share,
        context_len=share.count(plan.context_len, BLOCK_TOKENS),
        visible=share.count(plan.visible, BLOCK_TOKENS),
        page_of_row=np.where(share.holds(plan.offset_of_row, BLOCK_TOKENS), plan.page_of_row, np.int32(-1)),
    )


def attend_shares(
    k: ShareKernels, plan: BatchPlan, config: ModelConfig, q: torch.Tensor, parts: int
) -> torch.Tensor:
    rows = config.n_heads * (config.qk_nope_head_dim + config.v_head_dim)
    kv_b = matrix(rows, config.kv_lora_rank, "bfloat16", seed=4)
    assert isinstance(kv_b, DenseMatrix)
    packed = k.pack_kv_b(kv_b, config)
    plans = [plan_of_share(plan, KvShare(part, parts)) for part in range(parts)]
    return k.merge_shares([k.attend_share(q, packed, 1, p, config) for p in plans], config)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize(("rows", "contexts"), BATCHES)
@pytest.mark.parametrize(("config", "parts"), [(CONFIG, 2), (ODD, 4), (CONFIG, 16)])
@pytest.mark.parametrize(
    ("kernels", "kv_dtype"), [("native", "float32"), ("native", "bfloat16"), ("torch", "float32")]
)
def test_merged_shares_equal_the_whole(
    kernels: str,
    kv_dtype: str,
    config: ModelConfig,
    parts: int,
    rows: list[int],
    contexts: list[int],
    form: str,
) -> None:
    """Each share has only its own slots; some rows see nothing of a share, and some shares have no slot."""
    plan = plan_of(config, rows, contexts, kv_dtype)
    everything, nothing = np.arange(len(rows), dtype=np.int32), np.zeros(0, np.int32)
    absorbed, expanded = (everything, nothing) if form == "absorbed" else (nothing, everything)
    plan = replace(plan, absorbed=absorbed, expanded=expanded)
    q = normal(plan.n_rows, config.n_heads, config.qk_head_dim, seed=9)
    k: ShareKernels = native() if kernels == "native" else TorchKernels()
    close(attend_shares(k, plan, config, q, parts), attend(TorchKernels(), plan, config, q))


@pytest.mark.parametrize("k", [native(), TorchKernels()], ids=["native", "torch"])
def test_shares_store_each_latent_once(k: ShareKernels) -> None:
    plan = plan_of(CONFIG, [40, 1, 3], [50, 7, 33], "float32")
    kv_a = normal(plan.n_rows, CONFIG.latent_width)
    norm = normal(CONFIG.kv_lora_rank, seed=2)
    k.store_latent(kv_a, norm, 1e-6, 2, plan)
    for part in range(4):
        share = KvShare(part, 4)
        own = plan_of_share(plan, share)
        own.cache.pages.zero_()
        k.store_latent(kv_a, norm, 1e-6, 2, own)
        slots = share.slots(BLOCK_TOKENS)
        rows = own.page_of_row >= 0
        at = plan.page_of_row[rows], 2, plan.offset_of_row[rows]
        assert torch.equal(own.cache.pages[at], plan.cache.pages[at])
        own.cache.pages[:, :, slots] = 0.0
        assert not own.cache.pages.any()


@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_rows_whose_scores_overflow_are_nan_and_never_zero(kernels: str, form: str, parts: int) -> None:
    """A silent zero would be a wrong token; NaN fails the request. `parts` 0: without shares."""
    plan = plan_of(CONFIG, [2, 3], [40, 700], "float32")
    everything, nothing = np.arange(2, dtype=np.int32), np.zeros(0, np.int32)
    absorbed, expanded = (everything, nothing) if form == "absorbed" else (nothing, everything)
    plan = replace(plan, absorbed=absorbed, expanded=expanded)
    plan.cache.pages[..., CONFIG.kv_lora_rank :] = 1e20
    q = normal(plan.n_rows, CONFIG.n_heads, CONFIG.qk_head_dim, seed=9)
    q[..., CONFIG.qk_nope_head_dim :] = 0.0
    q[2:, :, CONFIG.qk_nope_head_dim :] = -1e20  # of the second sequence: all scores are -inf
    k: ShareKernels = native() if kernels == "native" else TorchKernels()
    out = attend_shares(k, plan, CONFIG, q, parts) if parts else attend(k, plan, CONFIG, q)
    assert out[:2].isfinite().all()
    assert out[2:].isnan().all()

"""The counted bytes and FLOPs of the device report, against figures by hand for known shapes."""

from __future__ import annotations

import pytest

from bench.gpu.case import Ceilings
from bench.gpu.counting.model_shapes import kimi_k25_cut, moonlight
from bench.gpu.counting.step_work import StepShape, device_shape, expected_experts, step_works
from bench.gpu.counting.work import (
    KIMI_K25,
    KernelWork,
    experts_work,
    int4_expert_bytes,
    linear_work,
    mla_decode_work,
    mla_prefill_work,
    norm_work,
    rope_work,
    router_work,
    sampling_work,
    swiglu_work,
    total_work,
)

H200 = Ceilings(4.3e12, 7.9e14)


def test_an_expert_has_4_5_bit_a_weight() -> None:
    assert int4_expert_bytes(KIMI_K25) == 3 * 2048 * 7168 * 45 // 80
    assert round(int4_expert_bytes(KIMI_K25) / 1e6, 2) == 24.77


def test_decode_reads_1152_bytes_and_needs_139264_flops_a_context_token() -> None:
    short, long = (mla_decode_work(KIMI_K25, [n], rows=1) for n in (1000, 1001))
    assert (long.n_bytes - short.n_bytes, long.flops - short.flops) == (1152, 139_264)
    assert mla_decode_work(KIMI_K25, [1000], rows=4).flops == 4 * short.flops


def test_prefill_counts_visible_pairs_only() -> None:
    whole, tail = (mla_prefill_work(KIMI_K25, rows, 8) for rows in (8, 2))
    expansion = 2 * 8 * 512 * 64 * 256
    per_pair = 2 * 64 * (128 + 64 + 128)
    assert whole.flops == expansion + 36 * per_pair
    assert tail.flops == expansion + 15 * per_pair


def test_prefill_reads_latents_and_their_projection_once() -> None:
    queries_and_results = 2 * 64 * (2 * 192 + 4 * 128)
    assert mla_prefill_work(KIMI_K25, 2, 8).n_bytes == 8 * 1152 + 2 * 64 * 256 * 512 + queries_and_results


def test_experts_are_read_once_each() -> None:
    one, two = (experts_work(KIMI_K25, 4, distinct) for distinct in (8, 9))
    assert two.n_bytes - one.n_bytes == int4_expert_bytes(KIMI_K25)
    assert one.flops == 2 * 4 * 8 * 3 * 2048 * 7168


def test_rows_of_the_small_programs() -> None:
    assert norm_work(KIMI_K25, 3).n_bytes == 3 * 7168 * (4 + 4 + 2 + 2)
    assert swiglu_work(KIMI_K25, 3).n_bytes == 3 * 2048 * (2 + 2 + 2)
    assert router_work(KIMI_K25, 3).n_bytes == 3 * (384 * 4 + 8 * (4 + 4))
    assert rope_work(KIMI_K25, 3).n_bytes == 3 * (64 * 64 * 2 * 2 + 576 * 2 * 2 + 64 * 4)
    assert sampling_work(163840, 3).n_bytes == 3 * 655_360
    assert linear_work(3, 7168, 512) == KernelWork(2 * (7168 * 512 + 3 * 7680), 2 * 3 * 7168 * 512)


def test_the_model_of_the_steps_has_the_dimensions_of_the_kernels() -> None:
    assert device_shape(kimi_k25_cut()) == KIMI_K25


@pytest.mark.parametrize(
    ("n_rows", "n_experts"), [(1, 8), (4, 31), (8, 60), (16, 110), (32, 188), (64, 284), (128, 358)]
)
def test_uniform_rows_read_so_many_of_384_experts(n_rows: int, n_experts: int) -> None:
    assert expected_experts(384, 8, n_rows) == pytest.approx(n_experts, abs=0.8)


def test_a_step_at_one_row_reads_every_weight_that_it_needs() -> None:
    """Kimi-K2.5's inventory: 8 layers of attention, one dense MLP, 7 times 8 of the experts, the head."""
    attention, shared, gate = 8 * 202.2e6, 7 * 88.1e6, 7 * 5.5e6
    experts, dense, head, kv = 7 * 8 * 24.77e6, 3 * 7168 * 18432 * 2, 2.349e9, 8 * 2048 * 1152
    expected = attention + shared + gate + experts + dense + head + kv
    work = total_work(step_works(kimi_k25_cut(), StepShape(1, 2048)))
    assert work.n_bytes == pytest.approx(expected, rel=2e-3)
    # Two FLOPs a weight of the row's experts, and the context of each layer.
    weights = (attention + shared + gate + dense + head) / 2 + 7 * 8 * 44.04e6
    assert work.flops == pytest.approx(2 * weights + 8 * 2048 * 139_264, rel=2e-3)


@pytest.mark.parametrize(
    ("model", "batch", "milliseconds"),
    [
        ("kimi", 1, 1.59),
        ("kimi", 64, 13.0),
        ("kimi", 256, 17.8),
        ("moonlight", 1, 0.76),
        ("moonlight", 64, 3.4),
        ("moonlight", 256, 6.3),
    ],
)
def test_the_floor_of_a_step_on_an_h200(model: str, batch: int, milliseconds: float) -> None:
    """Contexts of 2,048 tokens, 4.3 TB/s and 790 TFLOP/s; counted apart, without activations."""
    config = kimi_k25_cut() if model == "kimi" else moonlight()
    works = list(step_works(config, StepShape(batch, 2048)))
    assert H200.floor_us([total_work(works)]) / 1e3 == pytest.approx(milliseconds, rel=0.03)
    assert H200.floor_us(works) > 0.999 * H200.floor_us([total_work(works)])


def test_drafts_multiply_the_flops_of_attention_and_not_its_bytes() -> None:
    one, four = (
        total_work(step_works(kimi_k25_cut(), StepShape(16, 2048, rows, rows), [60] * 7)) for rows in (1, 4)
    )
    assert four.flops == pytest.approx(4 * one.flops, rel=1e-6)
    assert four.n_bytes < 1.05 * one.n_bytes


def test_prefill_needs_two_flops_an_active_weight_and_its_pairs() -> None:
    n = 2048
    step = StepShape(1, n, n, expands=True)
    work = total_work(step_works(kimi_k25_cut(), step))
    active = 8 * 101.12e6 + 7 * (9 * 44.04e6 + 2.75e6) + 396.36e6
    pairs = n * (n + 1) / 2 * 64 * 2 * (192 + 128) * 8
    assert work.flops == pytest.approx(2 * active * n + pairs + 2 * 1.174e9, rel=2e-3)


def test_shares_and_floor_of_counted_work() -> None:
    ceilings = Ceilings(100.0, 1000.0)
    assert ceilings.floor_us([KernelWork(100, 0), KernelWork(0, 500)]) == 1.5e6
    shares = ceilings.shares(KernelWork(100, 500), 2e6)
    assert (shares["copy_share"], shares["matmul_share"]) == (0.5, 0.25)

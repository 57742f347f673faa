"""The counted bytes and FLOPs of the device report, against figures by hand for Kimi-K2.5's shape."""

from __future__ import annotations

from bench.gpu.work import KIMI_K25, experts_work, int4_expert_bytes, mla_decode_work, mla_prefill_work


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


def test_experts_are_read_once_each() -> None:
    one, two = (experts_work(KIMI_K25, 4, distinct) for distinct in (8, 9))
    assert two.n_bytes - one.n_bytes == int4_expert_bytes(KIMI_K25)
    assert one.flops == 2 * 4 * 8 * 3 * 2048 * 7168

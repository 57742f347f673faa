"""The Triton programs in the interpreter, and the plain functions beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from libs.engine.kernels.gpu import mla_decode
from libs.engine.kernels.gpu.expert_weights import repack_int4
from libs.engine.kernels.gpu.kv_splits import choose_split_tokens, count_splits
from libs.engine.kernels.gpu.mla_decode import tile_sizes
from libs.engine.kernels.gpu.work_list import FEW_PAIRS, build_work_list
from tests.engine.kernels.gpu.draw_tests import DrawTests
from tests.engine.kernels.gpu.program_target import ProgramTarget
from tests.engine.kernels.gpu.program_tests import AttentionTests, ProductTests, RowTests
from tests.engine.kernels.test_kernels import normal
from tests.support.quantize import pack_int4


@pytest.fixture
def target() -> ProgramTarget:
    """The interpreter has no bf16 arithmetic."""
    return ProgramTarget(torch.device("cpu"), torch.float32)


class TestAttentionPrograms(AttentionTests):
    @pytest.mark.parametrize("rows", [1, 2, 8])
    def test_decode_of_64_heads_and_512_wide_latents(self, target: ProgramTarget, rows: int) -> None:
        """The tiles of fp32 are the same for each number of rows; a device runs all from 1 to 8."""
        super().test_decode_of_64_heads_and_512_wide_latents(target, rows)


class TestRowPrograms(RowTests):
    pass


class TestProductPrograms(ProductTests):
    pass


class TestDraws(DrawTests):
    pass


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
    splits = {n: count_splits(n, most_rows=1, n_heads=64, n_processors=132) for n in (1, 33, 64, 1000)}
    assert splits == {1: 132, 33: 2, 64: 2, 1000: 1}
    lengths = np.array([1, 100, 32768, 40000], np.int32)
    assert choose_split_tokens(lengths, 132).tolist() == [256, 256, 256, 320]
    assert choose_split_tokens(lengths, 2).tolist() == [256, 256, 16384, 20032]
    assert choose_split_tokens(lengths, 1).tolist() == [256, 256, 32768, 40000]


@given(
    lengths=st.lists(st.integers(1, 300_000), min_size=1, max_size=300),
    most_rows=st.integers(1, 9),
    n_heads=st.sampled_from([1, 16, 64]),
    n_processors=st.sampled_from([2, 132]),
)
def test_no_sequence_has_more_splits_than_programs(
    lengths: list[int], most_rows: int, n_heads: int, n_processors: int
) -> None:
    n_splits = count_splits(len(lengths), most_rows, n_heads, n_processors)
    context_len = np.array(lengths, np.int32)
    tokens = choose_split_tokens(context_len, n_splits)
    assert (tokens % 64 == 0).all()
    assert (-(-context_len // tokens) <= n_splits).all()


@given(
    n_vectors=st.integers(1, 200_000),
    block_tokens=st.integers(1, 16).map(lambda n: 16 * n),
    row_bytes=st.integers(16, 4600),
)
def test_a_tile_fits_in_shared_memory_and_divides_a_page(
    n_vectors: int, block_tokens: int, row_bytes: int
) -> None:
    """Up to latents of 1,150 values in fp32. Those of DeepSeek's models have 576."""
    vectors, tokens = tile_sizes(n_vectors, block_tokens, row_bytes)
    assert (vectors + 2 * tokens) * row_bytes <= 227 << 10
    assert min(vectors, tokens) >= 16
    assert block_tokens % tokens == 64 % tokens == 0


def test_a_tile_counts_what_pads_its_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tiles of 584 values in bf16 would fit; padded to 1,088 they take 417,792 bytes of an H100."""
    launches: list[dict[str, Any]] = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **constants: launches.append(constants)

    monkeypatch.setattr(mla_decode, "_split_program", Recorded())
    ids = torch.zeros(1, 1, dtype=torch.int32)
    plan: Any = SimpleNamespace(absorbed=ids[0], page_table=ids, query_start=None, context_len=None)
    splits: Any = SimpleNamespace(most_rows=4, n_splits=1, tokens=None)
    latent, rope = (torch.empty(4, 16, width, dtype=torch.bfloat16) for width in (520, 64))
    mla_decode.mla_decode(latent, rope, torch.empty(1, 64, 520 + 64), plan, splits, scale=1.0)
    (tile,) = launches
    row_bytes = (tile["BLOCK_LORA"] + tile["BLOCK_ROPE"]) * 2
    assert 3 * 64 * (520 + 64) * 2 <= 227 << 10
    assert (tile["BLOCK_M"] + 2 * tile["BLOCK_N"]) * row_bytes <= 227 << 10


def test_tiles_are_as_large_as_two_bytes_a_value_allow() -> None:
    assert tile_sizes(64, 64, 2 * 576) == (64, 64)
    assert tile_sizes(16, 64, 2 * 576) == (16, 64)
    assert tile_sizes(64, 64, 4 * 576) == (16, 16)

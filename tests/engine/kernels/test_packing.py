"""Panels hold each value at its place, in every variant of the library that this processor runs."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from libs.engine.kernels.library import load_library, processor_level
from libs.engine.kernels.native_types import declare

LEVELS = range(2, processor_level() + 1)
SHAPES = [(16, 32), (48, 34), (33, 70), (5, 3), (16, 31), (1, 16), (64, 1)]


@pytest.fixture(params=LEVELS, ids=lambda level: f"v{level}")
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return declare(load_library(request.param))


def panels_of(source: torch.Tensor, columns: int) -> torch.Tensor:
    """[panel][column group][16] of a matrix whose rows are padded with zeros, in plain torch."""
    rows, width = source.shape
    padded = source.new_zeros(-(-rows // 16) * 16, width)
    padded[:rows] = source
    return padded.view(-1, 16, width // columns, columns).transpose(1, 2).contiguous()


@pytest.mark.parametrize("shape", SHAPES)
def test_dense_values_are_where_the_layout_puts_them(library: ctypes.CDLL, shape: tuple[int, int]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = panels_of(values, 1)
    found = torch.full_like(expected, 7.0)
    assert library.ss_pack_f32(values.data_ptr(), *shape, found.data_ptr(), 0)
    assert torch.equal(found, expected)
    half = values.bfloat16()
    even = torch.nn.functional.pad(half, (0, shape[1] % 2))
    expected = panels_of(even, 2)
    found = torch.full_like(expected, 7.0)
    assert library.ss_pack_bf16(half.data_ptr(), *shape, found.data_ptr(), 0)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(16, 16), (48, 33), (5, 3)])
def test_nibbles_are_where_the_layout_puts_them(library: ctypes.CDLL, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    nibbles = torch.randint(0, 16, (*shape, 8), generator=generator)
    bits = torch.arange(0, 32, 4)
    source = (nibbles << bits).sum(-1).to(torch.int32)
    placed = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28])  # columns 2i and 2i + 1 at bits 4i and 16 + 4i
    expected = panels_of((nibbles << placed).sum(-1).to(torch.int32), 1)
    found = torch.full_like(expected, 7)
    library.ss_pack_int4(source.data_ptr(), *shape, found.data_ptr())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("place", [(0, 0), (17, 40), (32, 70), (47, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_out_of_range_are_found_wherever_they_are(
    library: ctypes.CDLL, dtype: torch.dtype, place: tuple[int, int]
) -> None:
    pack = library.ss_pack_f32 if dtype == torch.float32 else library.ss_pack_bf16
    largest = float(torch.finfo(dtype).max)
    out = torch.empty(48, 72, dtype=dtype)
    cases = [(float("nan"), 0), (float("-inf"), 0), (largest, 1), (-largest / 4, 3)]
    for bad, doublings in cases:
        values = torch.full((48, 71), largest / 16, dtype=dtype)
        assert pack(values.data_ptr(), 48, 71, out.data_ptr(), 3)
        values[place] = bad
        assert not pack(values.data_ptr(), 48, 71, out.data_ptr(), doublings), (bad, doublings)
        if doublings:
            assert pack(values.data_ptr(), 48, 71, out.data_ptr(), doublings - 1), (bad, doublings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@given(
    shape=st.tuples(st.integers(1, 50), st.integers(1, 100)),
    first=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    block=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    exponents=st.sampled_from([(-3, 3), (-149, -100), (110, 127)]),
    with_nan=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(shape=(48, 100), first=(16, 0), block=(128, 128), exponents=(-3, 3), with_nan=False, seed=1)
@example(shape=(16, 70), first=(0, 3), block=(16, 64), exponents=(-149, -100), with_nan=False, seed=2)
@example(shape=(16, 64), first=(0, 0), block=(16, 64), exponents=(-3, 3), with_nan=True, seed=3)
def test_fp8_is_packed_as_if_it_were_widened_first(
    level: int,
    dtype: torch.dtype,
    shape: tuple[int, int],
    first: tuple[int, int],
    block: tuple[int, int],
    exponents: tuple[int, int],
    with_nan: bool,
    seed: int,
) -> None:
    """Bit for bit: blocks are ragged, values become subnormal or infinite, and one may be NaN."""
    library, generator = declare(load_library(level)), torch.Generator().manual_seed(seed)
    is_bf16 = dtype == torch.bfloat16
    rows, cols = shape
    values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    values[values & 0x7F == 0x7F] = 0x38
    if with_nan:
        values[seed % rows, seed % cols] = 0xFF
    n_blocks = [-(-(begin + size) // each) for begin, size, each in zip(first, shape, block, strict=True)]
    factors = torch.rand(n_blocks, generator=generator) + 1
    factors = torch.ldexp(factors, torch.randint(*exponents, n_blocks, generator=generator))
    place = (*first, factors.data_ptr(), factors.shape[1], *block)
    widened = torch.empty(shape, dtype=dtype)
    targets = (None, widened.data_ptr()) if is_bf16 else (widened.data_ptr(), None)
    is_number = bool(library.ss_widen_fp8(values.data_ptr(), *shape, *place, *targets))
    expected = torch.full((-(-rows // 16) * 16 * (cols + cols % 2),), 7.0, dtype=dtype)
    found = expected.clone()
    pack = library.ss_pack_bf16 if is_bf16 else library.ss_pack_f32
    is_in_range = bool(pack(widened.data_ptr(), *shape, expected.data_ptr(), 0))
    assert is_number != with_nan
    accepted = bool(library.ss_pack_fp8(values.data_ptr(), *shape, *place, found.data_ptr(), is_bf16))
    assert accepted == (is_number and is_in_range)
    if accepted:
        word = torch.int16 if is_bf16 else torch.int32
        assert torch.equal(found.view(word), expected.view(word))

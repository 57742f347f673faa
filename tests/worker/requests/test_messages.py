"""Features on the wire: bfloat16 that rounds as torch does, and never hides a value that is not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from libs.worker.requests.messages import (
    bfloat16_features,
    float_features,
    pack_features,
    parse_bfloat16,
    parse_features,
)
from slipstream.errors import InvalidArgument


def test_features_round_as_torch_rounds() -> None:
    rows = np.random.default_rng(1).standard_normal((50, 16)).astype(np.float32)
    rows[0, :4] = 0.0, -0.0, 1 + 2**-8, 3.3e38  # a tie goes to the even neighbour
    packed = pack_features(rows)
    assert len(packed) == 2 * rows.size
    expected = torch.from_numpy(rows).bfloat16().float().numpy()
    assert np.array_equal(parse_features(packed, 16, "features"), expected)


def test_what_is_not_finite_stays_so() -> None:
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000], np.uint32)
    found = parse_features(pack_features(bits.view(np.float32)[None]), 5, "features")[0]
    assert np.isnan(found[:3]).all()
    assert found[3:].tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize(("n_bytes", "width"), [(3, 1), (6, 2), (4, 0)])
def test_bytes_that_are_no_rows_are_refused(n_bytes: int, width: int) -> None:
    with pytest.raises(InvalidArgument, match="no rows"):
        parse_features(bytes(n_bytes), width, "features")


def test_features_in_bfloat16_are_neither_rounded_again_nor_copied() -> None:
    rows = np.random.default_rng(1).standard_normal((3, 16)).astype("<f4")
    packed = pack_features(rows)
    bits = parse_bfloat16(packed, 16, "features")
    assert bits.base is not None and bfloat16_features(bits).base is not None
    assert pack_features(bits) == packed
    assert np.array_equal(float_features(bits), parse_features(packed, 16, "features"))
    assert np.array_equal(float_features(rows), rows)

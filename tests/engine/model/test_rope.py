"""YaRN frequencies against golden values of the releases, and the rotation itself."""

from __future__ import annotations

import pytest
import torch

from libs.engine.model_spec.config import parse_config
from libs.engine.model_spec.rope import Rope, correction_range, inverse_frequencies, rotate
from tests.engine.model.test_config import K25, YARN


@pytest.mark.parametrize(
    ("change", "low", "high"),
    [
        ({}, 8, 20),  # Kimi-K2.5
        ({"beta_fast": 1.0}, 19, 20),  # Kimi-K2-Instruct, -Thinking
        ({"theta": 10000.0, "factor": 40.0}, 10, 23),  # DeepSeek-V3
    ],
)
def test_correction_range(change: dict[str, float], low: int, high: int) -> None:
    theta = change.pop("theta", 50000.0)
    raw = K25 | {"rope_theta": theta, "rope_scaling": {"type": "yarn", **YARN, **change}}
    assert correction_range(parse_config(raw)) == (low, high)


def test_kimi_k25_frequencies() -> None:
    golden = [1, 0.18441062, 0.028427959, 0.0026702034, 1.8070234e-5, 3.3323431e-6, 4.3822065e-7]
    actual = inverse_frequencies(parse_config(K25))[[0, 5, 10, 15, 20, 25, 31]]
    torch.testing.assert_close(actual, torch.tensor(golden), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "scale"), [(1.0, 1.0, 1.0), (1.0, 0.0, 1.41589), (2.0, 1.0, 1.29373)]
)
def test_cos_sin_scale(mscale: float, mscale_all_dim: float, scale: float) -> None:
    yarn = YARN | {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    rope = Rope(parse_config(K25 | {"rope_scaling": {"type": "yarn", **yarn}}))
    cosines, sines = rope.cos_sin(torch.tensor([0]))[0]
    torch.testing.assert_close(cosines, torch.full((32,), scale), rtol=1e-4, atol=0)
    assert not sines.any()


def test_rotation_turns_interleaved_pairs_as_complex_numbers() -> None:
    rope = Rope(parse_config(K25))
    positions = torch.tensor([0, 3, 4096, 200_000])
    x = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(0))
    angles = positions[:, None].float() * rope.inv_freq
    pairs = torch.view_as_complex(x.reshape(4, 2, 32, 2).contiguous())
    wanted = torch.view_as_real(pairs * torch.polar(torch.ones(()), angles)[:, None]).flatten(-2)
    torch.testing.assert_close(rotate(x, rope.cos_sin(positions)), wanted, rtol=0, atol=1e-5)

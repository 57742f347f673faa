"""Rotary position embedding with DeepSeek YaRN, on interleaved pairs (x0,x1), (x2,x3), ..."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch

from libs.engine.model_spec.rope_config import YarnConfig


class RotaryConfig(Protocol):
    """The part of a model's or a draft head's configuration that makes the angles."""

    @property
    def qk_rope_head_dim(self) -> int: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def yarn(self) -> YarnConfig | None: ...


class Rope:
    """Angles of one model. Frequencies are fp32, as in transformers' `_compute_yarn_parameters`."""

    def __init__(
        self, config: RotaryConfig, place: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    ) -> None:
        """`place`: into the memory where positions are."""
        self.inv_freq = place(inverse_frequencies(config))
        self._scale = 1.0 if config.yarn is None else config.yarn.attention_factor

    def cos_sin(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [T] -> [T, 2, rope_dim / 2] fp32: the cosines, then the sines, of each pair."""
        angles = positions.float().unsqueeze(-1) * self.inv_freq
        table = torch.stack((angles.cos(), angles.sin()), dim=1)
        return table if self._scale == 1.0 else table * self._scale


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, ..., rope_dim] rotated pair by pair, in the same interleaved layout."""
    middle = (1,) * (x.dim() - 2)
    cos, sin = (part.reshape(x.shape[0], *middle, -1) for part in cos_sin.unbind(1))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def inverse_frequencies(config: RotaryConfig) -> torch.Tensor:
    """[rope_dim / 2] fp32: theta^(-2i/dim), interpolated by `factor` above the YaRN ramp."""
    dim = config.qk_rope_head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    base = 1.0 / (config.rope_theta**exponents)
    yarn = config.yarn
    if yarn is None:
        return base
    low, high = correction_range(config)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return base / yarn.factor * ramp + base * (1 - ramp)


def correction_range(config: RotaryConfig) -> tuple[float, float]:
    """The pair indices between which YaRN ramps from no interpolation to full interpolation."""
    yarn = config.yarn
    if yarn is None:
        raise ValueError("a correction range exists with YaRN only")
    dim = config.qk_rope_head_dim

    def pair_of(rotations: float) -> float:
        turns = yarn.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config.rope_theta))

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return float(low), float(high) if high != low else high + 0.001

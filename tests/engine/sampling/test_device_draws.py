"""Which rows are sampled on the device. tests/engine/kernels/gpu/draw_tests.py compares the tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from libs.engine.sampling.device_draws import DrawArrays, draw_arrays, samples_on_device
from libs.engine.step.types import SamplingParams
from slipstream.sampling import SAMPLING_DEFAULTS, SAMPLING_RANGES
from tests.engine.sampling.test_sampler import make_rows


@pytest.mark.parametrize("name", SAMPLING_RANGES)
def test_the_host_samples_what_the_device_does_not_know(name: str) -> None:
    """A row with a parameter that is missing in `DrawArrays` is not sampled on the device."""
    row, default = SAMPLING_RANGES[name], SAMPLING_DEFAULTS[name]
    drawn: dict[str, Any] = {"temperature": 1.0}
    stated = make_rows(SamplingParams(**{**drawn, name: row.low if row.high == default else row.high}))
    with_it, without = draw_arrays([stated]), draw_arrays([make_rows(SamplingParams(**drawn))])
    fields = [field.name for field in dataclasses.fields(DrawArrays)]
    is_known = any(not np.array_equal(getattr(with_it, each), getattr(without, each)) for each in fields)
    assert is_known or not samples_on_device(stated)

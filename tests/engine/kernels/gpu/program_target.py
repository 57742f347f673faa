"""Where the tests of programs run: a device, a dtype of activations, and the bounds that follow from it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tests.engine.kernels.test_kernels import normal

_BF16_ERROR = 1e-2  # of bf16 operands with fp32 sums, by the norm
_BF16_STEP = 2**-7


@dataclass(frozen=True)
class ProgramTarget:
    """References are computed in fp32 on the CPU, from values that the target's dtype has."""

    device: torch.device
    dtype: torch.dtype

    @cached_property
    def programs(self) -> Any:
        return importlib.import_module("tests.engine.kernels.gpu.programs")

    @property
    def is_exact(self) -> bool:
        return self.dtype == torch.float32

    def values(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Normal values in fp32 on the CPU, rounded to the dtype."""
        return normal(*shape, seed=seed).to(self.dtype).float()

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """On the device, in the dtype; a copy, also of strided values."""
        return values.to(self.dtype).to(self.device, copy=True)

    def on(self, values: torch.Tensor) -> torch.Tensor:
        """On the device, as they are; a copy."""
        return values.to(self.device, copy=True)

    def close(self, actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-5) -> None:
        """`tolerance` of each value in fp32; in bf16 the error of all, and a few steps of each one."""
        actual, wanted = actual.cpu().float(), wanted.float()
        if self.is_exact:
            torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)
            return
        assert actual.isfinite().all()
        assert float((actual - wanted).norm()) <= _BF16_ERROR * float(wanted.norm())
        largest = float(wanted.abs().max())
        torch.testing.assert_close(actual, wanted, rtol=4 * _BF16_STEP, atol=4 * _BF16_STEP * largest)

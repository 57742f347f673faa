"""Times on a CUDA device: events around one run, the median of many. The L2 cache is overwritten between."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

_WARM_RUNS = 3
_OVERWRITTEN_BYTES = 256 << 20


def median_us(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The device is busy with the overwriting while the host launches, so launches cost nothing here."""
    flushed = torch.empty(_OVERWRITTEN_BYTES, dtype=torch.uint8, device=device)
    for _ in range(_WARM_RUNS):
        run()
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(repeats):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        flushed.random_()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end) * 1e3)
    return median(times)


def copy_bytes_per_s(device: torch.device, repeats: int) -> float:
    """Read and written bytes of a device-to-device copy of 4 GiB."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_us(lambda: target.copy_(source), device, repeats) * 1e6


def matmul_flops_per_s(device: torch.device, repeats: int) -> float:
    """bf16 products of random matrices of 8192 x 8192."""
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_us(lambda: a @ b, device, repeats) * 1e6

"""Times on a CUDA device, the median of many; on a CPU wall time, for tests.

`median_us` and `alternating_us` count the device only: events around a run, and L2 overwritten between runs.
`wall_us` counts the host, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from bench.gpu.case import Ceilings

_WARM_RUNS = 3
_OVERWRITTEN_BYTES = 256 << 20
_COPY_BYTES = 4 << 30
_MATMUL_SIZE = 8192


def median_us(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    return alternating_us([run], device, repeats)[0]


def alternating_us(runs: Sequence[Callable[[], Any]], device: torch.device, repeats: int) -> list[float]:
    """The medians of several operations that run in turn.

    The device is busy with the overwriting while the host launches, so launches cost nothing here.
    """
    if device.type != "cuda":
        return [wall_us(run, device, repeats) for run in runs]
    overwritten = torch.empty(_OVERWRITTEN_BYTES, dtype=torch.uint8, device=device)
    for run in list(runs) * _WARM_RUNS:
        run()
    times: list[list[float]] = [[] for _ in runs]
    event: Any = torch.cuda.Event
    for _ in range(repeats):
        for run, taken in zip(runs, times, strict=True):
            begin, end = event(enable_timing=True), event(enable_timing=True)
            overwritten.random_()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize(device)
            taken.append(begin.elapsed_time(end) * 1e3)
    return [median(taken) for taken in times]


def wall_us(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """From an idle device to an idle device."""
    if device.type == "cuda":
        for _ in range(_WARM_RUNS):
            run()
    times: list[float] = []
    for _ in range(repeats):
        _wait(device)
        began_s = time.perf_counter()
        run()
        _wait(device)
        times.append((time.perf_counter() - began_s) * 1e6)
    return median(times)


def busy_us(run: Callable[[], Any], device: torch.device) -> float | None:
    """The time of all programs on the device in one run, without gaps between them; None on a CPU."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        _wait(device)
    return float(sum(entry.self_device_time_total for entry in profiled.key_averages()))


def measure_ceilings(device: torch.device, repeats: int, *, is_miniature: bool = False) -> Ceilings:
    """A copy of 4 GiB within the device, and bf16 products of random matrices of 8192 x 8192."""
    n_bytes, size = (1 << 20, 64) if is_miniature else (_COPY_BYTES, _MATMUL_SIZE)
    source = torch.empty(n_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copied_us = median_us(lambda: target.copy_(source), device, repeats)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    multiplied_us = median_us(lambda: a @ b, device, repeats)
    return Ceilings(2 * n_bytes / copied_us * 1e6, 2 * size**3 / multiplied_us * 1e6)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

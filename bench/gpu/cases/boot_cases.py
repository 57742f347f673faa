"""The load of a small random checkpoint, by the compiled kernels and onto the device: `bench.load`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench import load
from bench.gpu.case import Bench, Figure, ReportCase

_FORMATS = ("int4", "bf16")


def boot_cases(bench: Bench) -> Iterator[ReportCase]:
    """One round each. The rates are those of `bench.load`, onto the device of the report."""
    gb = 0.01 if bench.is_miniature else 1.0
    for weight_format in _FORMATS[: 1 if bench.is_miniature else None]:
        yield ReportCase("boot", f"{gb:g} GB in {weight_format}", partial(_measure, bench, gb, weight_format))


def _measure(bench: Bench, gb: float, weight_format: str) -> Figure:
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        n_bytes = load.write_checkpoint(Path(folder), gb * 1e9, weight_format)
        found = load.measure(Path(folder), 1, device=str(bench.device))
    return {"gb": n_bytes / 1e9, **found}

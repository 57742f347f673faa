"""The sections of the report in their order, with the seconds that each may take on a device.

Together with the tests they end in less than nine minutes. What a section leaves over is given to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from bench.gpu.case import Bench, Figure, ReportCase, ReportSection
from bench.gpu.cases.accuracy_cases import accuracy_cases
from bench.gpu.cases.boot_cases import boot_cases
from bench.gpu.cases.sampling_cases import sampling_cases
from bench.gpu.cases.step_cases import step_cases
from bench.gpu.counting.model_shapes import kimi_k25_cut, moonlight
from bench.gpu.timing import measure_ceilings, median_us

TESTS_BUDGET_S = 120.0


def _ceiling_cases(bench: Bench) -> Iterator[ReportCase]:
    def measure() -> Figure:
        return asdict(measure_ceilings(bench.device, bench.repeats, is_miniature=bench.is_miniature))

    yield ReportCase("ceilings", "a copy, and a bf16 product", measure)


def _kernel_cases(bench: Bench) -> Iterator[ReportCase]:
    from bench.gpu.cases.kernel_cases import FULL, SMALL, KernelCase, kernel_cases

    def measure(case: KernelCase) -> Figure:
        kernel = case.prepare(bench.device)
        taken_us = median_us(kernel.run, bench.device, bench.repeats)
        return {"median_us": taken_us} | bench.ceilings.shares(kernel.work, taken_us)

    for case in kernel_cases(SMALL if bench.is_miniature else FULL):
        yield ReportCase(case.name, case.setting, partial(measure, case))


def _peer_cases(bench: Bench) -> Iterator[ReportCase]:
    from bench.gpu.cases.peer_cases import peer_cases

    return peer_cases(bench)


CEILINGS = ReportSection("ceilings", 20, _ceiling_cases)
SECTIONS = (
    ReportSection("kernels", 90, _kernel_cases),
    ReportSection("steps_moonlight", 45, lambda bench: step_cases(bench, moonlight)),
    ReportSection("steps_kimi_k25_8_layers", 60, lambda bench: step_cases(bench, kimi_k25_cut)),
    ReportSection("sampling", 20, sampling_cases),
    ReportSection("accuracy", 35, accuracy_cases),
    ReportSection("boot", 50, boot_cases),
    ReportSection("peers", 70, _peer_cases),  # those that compile with nvcc may take all of it
)

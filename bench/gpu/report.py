"""Runs the sections one after another, each in a process with a deadline, and then tests/gpu."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bench.gpu.bounded_process import BoundedProcess
from bench.gpu.case import Bench, Ceilings, Figure, ReportSection
from bench.gpu.section_process import TIME_IS_OVER
from bench.gpu.sections import CEILINGS, SECTIONS, TESTS_BUDGET_S

_NO_CEILINGS = "the ceilings of the device were not measured"
_TEST_COMMAND = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu")


@dataclass(slots=True)
class DeviceReport:
    """`left_out`: the section, the case and the reason of each case without a figure.

    `tests` counts outcomes of tests/gpu; `tests_status` is pytest's, or 1 when its time was over.
    """

    figures: list[Figure] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    tests: dict[str, int] = field(default_factory=dict)
    tests_status: int | None = None
    ceilings: Ceilings | None = None
    seconds: float = 0.0

    def add(self, section: ReportSection, row: dict[str, Any]) -> None:
        if "figure" in row:
            self.figures.append(row["figure"])
        else:
            self.left_out.append({"section": section.name} | row["left_out"])


def total_budget_s(sections: tuple[ReportSection, ...] = SECTIONS, *, runs_tests: bool = True) -> float:
    tests_s = TESTS_BUDGET_S if runs_tests else 0.0
    return CEILINGS.budget_s + sum(section.budget_s for section in sections) + tests_s


def run_report(
    bench: Bench,
    limit_s: float,
    show: Callable[[Figure], None],
    sections: tuple[ReportSection, ...] = SECTIONS,
    command_of: Callable[[ReportSection, Bench, float], list[str]] | None = None,
    *,
    runs_tests: bool = True,
) -> DeviceReport:
    """Measure all; budgets shrink together to fit into `limit_s`. Tests run where there is a device."""
    report, began_s, spent_s = DeviceReport(), time.monotonic(), 0.0
    share = min(limit_s / total_budget_s(sections, runs_tests=runs_tests), 1.0)
    for section in (CEILINGS, *sections):
        spent_s += section.budget_s * share
        if section is not CEILINGS and report.ceilings is None:
            _leave_out(report, section, bench, _NO_CEILINGS)
            continue
        left_s = spent_s - (time.monotonic() - began_s)
        command = (command_of or section_command)(section, bench, left_s)
        for figure in _run_section(report, section, bench, BoundedProcess(command, left_s)):
            show(figure)
        if section is CEILINGS and report.figures:
            figure = report.figures.pop()
            report.ceilings = Ceilings(figure["copy_bytes_per_s"], figure["matmul_flops_per_s"])
            bench = replace(bench, ceilings=report.ceilings)
    if runs_tests and bench.device.type == "cuda":
        _run_tests(report, spent_s + TESTS_BUDGET_S * share - (time.monotonic() - began_s))
    report.seconds = time.monotonic() - began_s
    return report


def section_command(section: ReportSection, bench: Bench, limit_s: float) -> list[str]:
    command = [sys.executable, "-m", "bench.gpu.section_process", section.name]
    command += ["--device", str(bench.device), "--repeats", str(bench.repeats), "--limit-s", str(limit_s)]
    command += ["--ceilings", str(bench.ceilings.copy_bytes_per_s), str(bench.ceilings.matmul_flops_per_s)]
    return [*command, "--miniature"] if bench.is_miniature else command


def _run_section(
    report: DeviceReport, section: ReportSection, bench: Bench, process: BoundedProcess
) -> list[Figure]:
    """Add what the process prints, and what it did not come to; returns the figures."""
    n_before, left_before = len(report.figures), len(report.left_out)
    for line in process.lines():
        if line.startswith("{"):
            report.add(section, json.loads(line))
    seen = {f"{f['name']}, {f['setting']}" for f in report.figures[n_before:]}
    seen |= {row["case"] for row in report.left_out[left_before:]}
    if process.status != 0:
        why = TIME_IS_OVER if process.status is None else f"its process ended with {process.status}"
        _leave_out(report, section, bench, why, seen)
    return report.figures[n_before:]


def _leave_out(
    report: DeviceReport, section: ReportSection, bench: Bench, reason: str, seen: set[str] | None = None
) -> None:
    for case in section.cases(bench):
        name = f"{case.name}, {case.setting}"
        if name not in (seen or ()):
            report.left_out.append({"section": section.name, "case": name, "reason": reason})


def _run_tests(report: DeviceReport, limit_s: float) -> None:
    process = BoundedProcess(_TEST_COMMAND, limit_s)
    last = ""
    for line in process.lines():
        print(line, flush=True)
        last = line or last
    report.tests = {word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", last)}
    report.tests_status = 1 if process.status is None else process.status
    if process.status is None:
        report.left_out.append({"section": "tests", "case": "tests/gpu", "reason": TIME_IS_OVER})


def print_left_out(report: DeviceReport) -> None:
    counted = Counter((row["section"], row["reason"]) for row in report.left_out)
    for (section, reason), count in counted.items():
        print(f"LEFT OUT of {section}: {count} cases: {reason}")

"""The report as a whole: its budgets, its deadlines, and what it says of cases without a figure."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from bench.gpu import __main__ as command
from bench.gpu import report as report_module
from bench.gpu.bounded_process import BoundedProcess
from bench.gpu.case import Bench, Ceilings, ReportCase, ReportSection
from bench.gpu.report import DeviceReport, print_left_out, run_report, section_command, total_budget_s
from bench.gpu.section_process import TIME_IS_OVER
from bench.gpu.sections import SECTIONS

MINIATURE = Bench(torch.device("cpu"), 1, Ceilings(1.0, 1.0), is_miniature=True)
CEILINGS = {"copy_bytes_per_s": 5.0, "matmul_flops_per_s": 7.0}
FIGURE = {"name": "a", "setting": "x", "section": "s", "median_us": 2.0}


def section(name: str, budget_s: float) -> ReportSection:
    return ReportSection(name, budget_s, lambda _: [ReportCase("a", "x", dict), ReportCase("b", "y", dict)])


def printing(*rows: dict[str, Any], then: str = "") -> list[str]:
    """A command that prints JSON lines, then runs `then`."""
    loop = "for row in json.loads(sys.argv[1]): print(json.dumps(row), flush=True)"
    script = f"import json, sys, time\n{loop}\n{then}"
    return [sys.executable, "-S", "-c", script, json.dumps(rows)]


def run(commands: dict[str, list[str]], limit_s: float = 1e9, budget_s: float = 300.0) -> DeviceReport:
    """A report whose sections are those of `commands`, without the ceilings."""
    commands = {"ceilings": printing({"figure": CEILINGS | {"name": "c", "setting": ""}})} | commands
    sections = tuple(section(name, budget_s) for name in commands if name != "ceilings")
    return run_report(MINIATURE, limit_s, lambda _: None, sections, lambda s, _bench, _left: commands[s.name])


def test_all_budgets_together_are_less_than_nine_minutes() -> None:
    assert total_budget_s() <= 9 * 60 - 25  # set-up of the environment and of Python


def test_chosen_sections_share_the_time_of_the_others() -> None:
    chosen = SECTIONS[:2]
    wanted = total_budget_s((), runs_tests=False) + sum(section.budget_s for section in chosen)
    assert total_budget_s(chosen, runs_tests=False) == wanted < total_budget_s(chosen)


def test_chosen_sections_are_measured_alone_and_others_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], bool]] = []

    def record(_bench: Any, _limit_s: float, _show: Any, chosen: Any, *, runs_tests: bool) -> DeviceReport:
        asked.append(([section.name for section in chosen], runs_tests))
        return DeviceReport()

    monkeypatch.setattr(report_module, "run_report", record)
    command.measure(MINIATURE, 60, ("sampling", "kernels"))
    command.measure(MINIATURE, 60)
    assert asked == [(["kernels", "sampling"], False), ([section.name for section in SECTIONS], True)]
    with pytest.raises(SystemExit, match="no section smapling, but kernels"):
        command.measure(MINIATURE, 60, ("smapling",))


def test_some_sections_do_not_replace_the_report_of_all() -> None:
    stated = Path("some.json")
    assert command.output_of(None, ()) == Path("docs/benchmarks/gpu.json")
    assert command.output_of(None, ("sampling",)) is None
    assert command.output_of(stated, ()) == command.output_of(stated, ("sampling",)) == stated


def test_figures_and_reasons_are_collected() -> None:
    left = {"left_out": {"case": "b, y", "reason": "no peer"}}
    report = run({"one": printing({"figure": FIGURE}, left)})
    assert report.ceilings == Ceilings(5.0, 7.0)
    assert report.figures == [FIGURE]
    assert report.left_out == [{"section": "one", "case": "b, y", "reason": "no peer"}]
    assert report.tests_status is None, "tests need a device"


def test_a_section_that_hangs_is_killed_and_the_next_one_runs() -> None:
    hanging = printing({"figure": FIGURE}, then="time.sleep(600)")
    began_s = time.monotonic()
    commands = {"one": hanging, "two": printing({"figure": FIGURE})}
    report = run(commands, limit_s=0.35 * total_budget_s(), budget_s=10.0)
    assert time.monotonic() - began_s < 300
    assert report.figures == [FIGURE, FIGURE]
    assert {"section": "one", "case": "b, y", "reason": TIME_IS_OVER} in report.left_out


def test_a_section_that_dies_is_named_with_its_status() -> None:
    report = run({"one": printing({"figure": FIGURE}, then="sys.exit(3)")})
    assert report.left_out == [{"section": "one", "case": "b, y", "reason": "its process ended with 3"}]


def test_without_ceilings_nothing_else_is_measured() -> None:
    report = run({"ceilings": printing(then="sys.exit(1)"), "one": printing({"figure": FIGURE})})
    assert report.ceilings is None and not report.figures
    reasons = {(row["section"], row["reason"]) for row in report.left_out}
    assert ("one", "the ceilings of the device were not measured") in reasons


def test_a_process_is_killed_with_its_children() -> None:
    script = "import subprocess\np = subprocess.Popen(['sleep', '600'])\nprint(p.pid, flush=True)\np.wait()"
    for limit_s in (4.0, 16.0, 64.0):  # until a slow machine starts both in this time
        process = BoundedProcess([sys.executable, "-S", "-c", script], limit_s)
        pids = list(process.lines())
        assert process.status is None
        if pids:
            break
    (pid,) = pids
    deadline_s = time.monotonic() + 30
    while _is_running(int(pid)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_real_section_runs_in_its_process() -> None:
    sampling = next(each for each in SECTIONS if each.name == "sampling")
    process = BoundedProcess(section_command(sampling, MINIATURE, 300), 300)
    rows = [json.loads(line) for line in process.lines()]
    assert process.status == 0
    assert [row["figure"]["setting"] for row in rows] == [c.setting for c in sampling.cases(MINIATURE)]


def test_what_is_left_out_is_printed_once_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"section": "peers", "case": str(n), "reason": "humming is not installed"} for n in range(3)]
    print_left_out(DeviceReport(left_out=rows))
    assert capsys.readouterr().out == "LEFT OUT of peers: 3 cases: humming is not installed\n"


def test_the_outcome_of_the_device_tests_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "print('....'); print('3 passed, 1 failed, 2 skipped in 4.2s'); raise SystemExit(1)"
    monkeypatch.setattr(report_module, "_TEST_COMMAND", (sys.executable, "-S", "-c", script))
    report = DeviceReport()
    report_module._run_tests(report, 60)
    assert report.tests_status == 1
    assert (report.tests["passed"], report.tests["failed"], report.tests["skipped"]) == (3, 1, 2)


def test_without_a_device_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "is_triton_installed", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--output", str(tmp_path / "gpu.json")])
    assert command.main() == 0
    assert "NOTHING WAS MEASURED: device cuda:0: no CUDA device here" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_line_shows_what_a_figure_has(capsys: pytest.CaptureFixture[str]) -> None:
    command.show(
        {"name": "decode_step", "setting": "1 row", "wall_us": 12.34, "floor_share": 0.5, "busy_us": None}
    )
    assert " ".join(capsys.readouterr().out.split()) == "decode_step 1 row 12.3 us, 50.0% of the floor"

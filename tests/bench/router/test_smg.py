"""SMG beside the router: the reasons why it cannot run, and the ratios of two routers' figures."""

from __future__ import annotations

import contextlib
import venv
from pathlib import Path

import pytest

from bench.router.__main__ import main, parse
from bench.router.ratio import median_row, ratios
from bench.router.smg import SmgUnusable, interpreter, smg_beside

# A Python that claims to have SMG: the fake workers start, and SMG does not.
BROKEN = """#!/bin/sh
case "$*" in
*smg_worker*) echo "listening 1"; exec cat ;;
*launch*) echo "no such policy" >&2; exit 3 ;;
*) echo "[]" ;;
esac
"""


def row(requests_per_s: float, cpu_ms: float, ttft_ms: float) -> dict[str, object]:
    return {
        "requests_per_s": requests_per_s,
        "router_cpu_ms_per_request": cpu_ms,
        "ttft_ms": {"p50": ttft_ms, "p99": 2 * ttft_ms},
        "streams": 32,
    }


def test_ratios_are_ours_to_smgs() -> None:
    found = ratios(
        {"grpc": row(300.0, 3.0, 20.0), "http": row(600.0, 1.5, 5.0), "smg": row(600.0, 1.2, 10.0)}
    )
    assert found["ratio_to_smg"] == {
        "grpc": {
            "requests_per_s": 0.5,
            "router_cpu_ms_per_request": 2.5,
            "ttft_ms_p50": 2.0,
            "ttft_ms_p99": 2.0,
        },
        "http": {
            "requests_per_s": 1.0,
            "router_cpu_ms_per_request": 1.25,
            "ttft_ms_p50": 0.5,
            "ttft_ms_p99": 0.5,
        },
    }


def test_without_smg_there_are_no_ratios() -> None:
    assert ratios({"grpc": row(300.0, 3.0, 20.0)}) == {}


def test_what_one_side_lacks_has_no_ratio() -> None:
    found = ratios({"grpc": {"requests_per_s": 3.0}, "smg": row(2.0, 0.0, 10.0)})
    assert found["ratio_to_smg"] == {"grpc": {"requests_per_s": 1.5}}


def test_rounds_become_medians_figure_by_figure() -> None:
    rows = [row(100.0, 3.0, 9.0), row(300.0, 1.0, 5.0), row(200.0, 2.0, 7.0)]
    assert median_row(rows) == row(200.0, 2.0, 7.0)
    assert median_row([{"mean": 1.0, "max": 2.0}, {"mean": 3.0}]) == {"mean": 2.0}


def test_rounds_are_several_where_two_are_compared() -> None:
    assert parse([]).rounds == 1
    assert parse(["--smg", "/env"]).rounds == 3
    assert parse(["--smg", "/env", "--rounds", "5"]).rounds == 5
    assert parse(["--smg", "/env", "--smg-arguments=--policy random"]).smg_arguments == "--policy random"


async def test_an_environment_without_smg_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    with pytest.raises(
        SmgUnusable, match=r"smg-grpc-proto h2.*Missing there: \['smg', 'smg_grpc_proto', 'h2'\]"
    ):
        await interpreter(tmp_path)


async def test_a_path_that_is_no_environment_is_refused(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SmgUnusable, match="environment's folder or its interpreter"):
            await interpreter(where)


def test_the_command_ends_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"bench\.router: .* is no Python"):
        main(["--smg", str(tmp_path), "--only", "throughput"])


async def test_smg_that_does_not_start_says_why_and_nothing_stays(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(BROKEN)
    python.chmod(0o755)
    with pytest.raises(SmgUnusable, match=r"(?s)ended with status 3.*no such policy"):
        async with smg_beside(tmp_path, tmp_path, prefill_ms=0.0, step_ms=1.0):
            pass
    assert _processes_of(tmp_path) == []


def _processes_of(folder: Path) -> list[bytes]:
    """Command lines that name it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(path.read_bytes())
    return [line for line in found if str(folder).encode() in line]

"""Measures everything of one CUDA device in less than nine minutes, and writes docs/benchmarks/gpu.json.

Kernels against the ceilings of the device and against peers, sampling, whole steps against their floor,
prefill, accuracy, boot, and tests/gpu. Each section has a budget of time; what does not fit is named.
Without a device it reports so, compiles the programs for sm_90 where Triton is installed, writes nothing and
exits with 0. With a device the exit status is that of the tests. `--only` names sections to measure; their
figures are written where `--output` names a file.
`--miniature` runs all sections with tiny shapes on the CPU, in Triton's interpreter, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.gpu.case import Bench, Ceilings, Figure
from libs.engine.kernels.device import is_triton_installed, open_device
from slipstream.errors import SlipstreamError

_OUTPUT = Path("docs/benchmarks/gpu.json")
# Of a figure, what its line shows: the key, a form, and what stands behind it.
_SHOWN = (
    ("median_us", "{:.1f}", "us"),
    ("wall_us", "{:.1f}", "us"),
    ("busy_us", "{:.1f}", "us on the device"),
    ("floor_share", "{:.1%}", "of the floor"),
    ("copy_share", "{:.1%}", "of copy"),
    ("matmul_share", "{:.1%}", "of the product"),
    ("tokens_per_s", "{:.0f}", "tokens/s"),
    ("peer_us", "{:.1f}", "us of the peer"),
    ("ratio", "{:.2f}", "times as fast"),
    ("difference", "{:.1e}", "different"),
    ("our_median_error", "{:.2e}", "off"),
    ("their_median_error", "{:.2e}", "off in transformers"),
    ("drive_ratio", "{:.2f}", "of raw reads"),
    ("cache_ratio", "{:.2f}", "of a copy in memory"),
)


def show(figure: Figure) -> None:
    values = [
        f"{form.format(figure[key])} {unit}" for key, form, unit in _SHOWN if figure.get(key) is not None
    ]
    print(f"{figure['name']:16} {figure['setting']:42} {', '.join(values)}", flush=True)


def without_device(why: str) -> None:
    print(f"NOTHING WAS MEASURED: {why}")
    if not is_triton_installed():
        print("Triton is missing too (pip install 'slipstream-server[gpu]'), so nothing was compiled.")
        return
    from bench.gpu.compiled import print_compiled

    print("The programs compiled for sm_90 instead:")
    print_compiled()


def measure(bench: Bench, limit_s: float, only: Collection[str] = ()) -> dict[str, Any]:
    """`only`: the names of sections; empty = all of them, and the tests."""
    import triton

    from bench.gpu.report import print_left_out, run_report
    from bench.gpu.sections import SECTIONS

    names = [section.name for section in SECTIONS]
    if unknown := sorted(set(only) - set(names)):
        raise SystemExit(f"--only: no section {', '.join(unknown)}, but {', '.join(names)}")
    chosen = tuple(section for section in SECTIONS if not only or section.name in only)
    report = run_report(bench, limit_s, show, chosen, runs_tests=not only)
    print_left_out(report)
    print(f"took {report.seconds:.0f} s; tests/gpu: {report.tests or 'not run'}")
    is_cuda = bench.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(bench.device) if is_cuda else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "at_unix_s": int(time.time()),
        **asdict(report),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda:0", help="(default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=30, help="runs, the median counts (default: %(default)s)"
    )
    parser.add_argument("--limit-s", type=float, default=510.0, help="for everything (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", default=(), help="sections, and no tests (default: all of them, and the tests)"
    )
    parser.add_argument("--output", type=Path, help=f"(default: {_OUTPUT}, and no file with --only)")
    parser.add_argument("--miniature", action="store_true", help="tiny shapes on the CPU, for tests")
    return parser.parse_args()


def output_of(stated: Path | None, only: Collection[str]) -> Path | None:
    """The file of the report. Some sections do not replace the report of all."""
    return _OUTPUT if stated is None and not only else stated


def main() -> int:
    arguments = _options()
    unknown = Ceilings(1.0, 1.0)
    if arguments.miniature:
        os.environ["TRITON_INTERPRET"] = "1"  # before the programs are imported
        bench = Bench(torch.device("cpu"), 1, unknown, is_miniature=True)
        measure(bench, arguments.limit_s, arguments.only)
        return 0
    try:
        device = open_device(arguments.device)
    except SlipstreamError as error:
        without_device(error.message)
        return 0
    if device.type != "cuda":
        print("--device must be cuda or cuda:N", file=sys.stderr)
        return 2
    if not is_triton_installed():
        print("Triton is missing: pip install 'slipstream-server[gpu]'", file=sys.stderr)
        return 1
    report = measure(Bench(device, arguments.repeats, unknown), arguments.limit_s, arguments.only)
    if output := output_of(arguments.output, arguments.only):
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {output}")
    return int(report["tests_status"] or 0)


if __name__ == "__main__":
    sys.exit(main())

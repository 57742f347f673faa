"""Measures every kernel on one CUDA device, runs tests/gpu, and writes docs/benchmarks/gpu.json.

Without a device it reports so, compiles the programs for sm_90 where Triton is installed, writes nothing and
exits with 0. With a device the exit status is that of the tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from libs.engine.kernels.device import open_device
from slipstream.errors import SlipstreamError

_OUTPUT = Path("docs/benchmarks/gpu.json")
_TESTS_LIMIT_S = 180


@dataclass(frozen=True, slots=True)
class Figure:
    """Shares are of the measured copy bandwidth and the measured bf16 product, not of the data sheet's."""

    name: str
    setting: str
    n_bytes: int
    flops: int
    median_us: float
    copy_share: float
    matmul_share: float


def measure(device: torch.device, repeats: int, limit_s: float) -> dict[str, Any]:
    """Cases that begin after `limit_s` are listed as left out."""
    from bench.gpu.cases import all_cases
    from bench.gpu.timing import copy_bytes_per_s, matmul_flops_per_s, median_us

    began = time.monotonic()
    copy, matmul = copy_bytes_per_s(device, repeats), matmul_flops_per_s(device, repeats)
    figures: list[dict[str, Any]] = []
    left_out: list[str] = []
    for case in all_cases():
        if time.monotonic() - began > limit_s:
            left_out.append(f"{case.name}, {case.setting}")
            continue
        run, work = case.make(device)
        taken_us = median_us(run, device, repeats)
        seconds = taken_us / 1e6
        shares = work.n_bytes / seconds / copy, work.flops / seconds / matmul
        figure = Figure(case.name, case.setting, work.n_bytes, work.flops, taken_us, *shares)
        figures.append(asdict(figure))
        print(
            f"{case.name:16} {case.setting:40} {taken_us:10.1f} us  {shares[0]:6.1%} of copy  "
            f"{shares[1]:6.1%} of matmul",
            flush=True,
        )
        del run
    return {
        "copy_bytes_per_s": copy,
        "matmul_flops_per_s": matmul,
        "figures": figures,
        "left_out": left_out,
    }


def run_tests() -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    try:
        return subprocess.run(command, timeout=_TESTS_LIMIT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"tests/gpu took longer than {_TESTS_LIMIT_S} s")
        return 1


def without_device(why: str) -> None:
    print(f"NOTHING WAS MEASURED: {why}")
    if importlib.util.find_spec("triton") is None:
        print("Triton is missing too (pip install 'slipstream-server[gpu]'), so nothing was compiled.")
        return
    from bench.gpu.compiled import print_compiled

    print("The programs compiled for sm_90 instead:")
    print_compiled()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda:0", help="(default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=30, help="runs, the median counts (default: %(default)s)"
    )
    parser.add_argument("--limit-s", type=float, default=300.0, help="for all cases (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=_OUTPUT, help="(default: %(default)s)")
    arguments = parser.parse_args()
    try:
        device = open_device(arguments.device)
    except SlipstreamError as error:
        without_device(error.message)
        return 0
    if device.type != "cuda":
        parser.error("--device must be cuda or cuda:N")
    import triton

    report = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "at_unix_s": int(time.time()),
        **measure(device, arguments.repeats, arguments.limit_s),
        "tests_status": run_tests(),
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {arguments.output}")
    return int(report["tests_status"])


if __name__ == "__main__":
    sys.exit(main())

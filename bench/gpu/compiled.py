"""Compiles every program of the report for sm_90, without a device: what ptxas gives each of them.

A driver without a device stands in, and launches stop after compilation.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

_HOPPER = 90


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """One specialisation of a program. `spilled_bytes` of registers lie in local memory."""

    name: str
    case: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix_instructions: str


class _NoDevice:
    """What Triton asks of a driver until a program is launched."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", _HOPPER, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_all(dtype: torch.dtype = torch.bfloat16) -> list[CompiledProgram]:
    """Compile the programs of all cases with activations of `dtype`.

    This process cannot launch programs afterwards.
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from bench.gpu.cases.kernel_cases import FULL, kernel_cases

    driver.set_active(_NoDevice())
    seen: dict[str, CompiledProgram] = {}
    case_name = ""
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        program = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if program.hash not in seen:
            seen[program.hash] = _describe(program, case_name)
        return program

    JITFunction.run = compile_only
    try:
        for case in kernel_cases(replace(FULL, dtype=dtype)):
            case_name = f"{case.name}, {case.setting}"
            case.prepare(torch.device("cpu")).run()
    finally:
        JITFunction.run = launch
    return list(seen.values())


def _describe(program: Any, case: str) -> CompiledProgram:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        answer = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", answer))
    ptx = program.asm["ptx"]
    kind = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "none"
    return CompiledProgram(
        name=str(program.metadata.name),
        case=case,
        registers=int(usage["REG"]),
        spilled_bytes=int(usage["STACK"]) + int(usage["LOCAL"]),
        shared_bytes=int(program.metadata.shared),
        matrix_instructions=kind,
    )


def print_compiled() -> None:
    for program in compile_all():
        print(
            f"{program.name:18} {program.case:52} {program.registers:4} registers, "
            f"{program.spilled_bytes:5} B spilled, {program.shared_bytes:7} B shared, "
            f"{program.matrix_instructions}"
        )

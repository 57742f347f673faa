"""The Triton programs compile for sm_90, within its limits. This needs no device, but half a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.soak

# In another process: launches are impossible where programs are only compiled, and the interpreter is off.
_SCRIPT = """
import json
import sys
from dataclasses import asdict
import torch
from bench.gpu.compiled import compile_all
print(json.dumps([asdict(program) for program in compile_all(getattr(torch, sys.argv[1]))]))
"""
_SHARED_LIMIT_BYTES = 227 << 10
_MATRIX_PROGRAMS = ("_split_program", "_grouped_program", "_chunk_program")


def compiled(dtype: str) -> list[dict[str, Any]]:
    pytest.importorskip("triton", reason="Triton is missing: pip install 'slipstream-server[gpu]'")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run(
        [sys.executable, "-c", _SCRIPT, dtype],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    programs: list[dict[str, Any]] = json.loads(answer.stdout)
    assert set(_MATRIX_PROGRAMS) <= {program["name"] for program in programs}
    return programs


def test_programs_fit_and_use_matrix_units() -> None:
    for program in compiled("bfloat16"):
        assert program["shared_bytes"] <= _SHARED_LIMIT_BYTES, program
        if program["name"] in _MATRIX_PROGRAMS:
            # A pair of a token and an expert is a product with one column, which is too narrow for wgmma.
            has_few_rows = program["case"] == "int4_experts, 1 tokens"
            assert program["matrix_instructions"] == ("mma" if has_few_rows else "wgmma"), program
            assert program["spilled_bytes"] <= 512, program


def test_programs_of_fp32_fit_and_spill_little() -> None:
    """A device sets memory aside for the spills of all its threads: 270 MB for each KB of a thread."""
    for program in compiled("float32"):
        assert program["shared_bytes"] <= _SHARED_LIMIT_BYTES, program
        assert program["spilled_bytes"] <= 1024, program

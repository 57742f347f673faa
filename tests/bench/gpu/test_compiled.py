"""The Triton programs compile for sm_90, within its limits. This needs no device, but half a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.soak

# In another process: launches are impossible where programs are only compiled, and the interpreter is off.
_SCRIPT = """
import json
from dataclasses import asdict
from bench.gpu.compiled import compile_all
print(json.dumps([asdict(program) for program in compile_all()]))
"""
_SHARED_LIMIT_BYTES = 227 << 10


def test_programs_fit_and_use_matrix_units() -> None:
    pytest.importorskip("triton", reason="Triton is missing: pip install 'slipstream-server[gpu]'")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    programs = json.loads(answer.stdout)
    assert {"_split_program", "_grouped_program", "_chunk_program"} <= {p["name"] for p in programs}
    for program in programs:
        assert program["shared_bytes"] <= _SHARED_LIMIT_BYTES, program
        if program["name"] in ("_split_program", "_grouped_program", "_chunk_program"):
            # A pair of a token and an expert is a product with one column, which is too narrow for wgmma.
            has_few_rows = program["case"] == "int4_experts, 1 tokens"
            assert program["matrix_instructions"] == ("mma" if has_few_rows else "wgmma"), program
            assert program["spilled_bytes"] <= 512, program

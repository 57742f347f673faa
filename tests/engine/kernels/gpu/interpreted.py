"""Triton's programs on the CPU: the interpreter is chosen when a program is defined, so before any import."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is missing: pip install 'slipstream-server[gpu]'")

from tests.engine.kernels.gpu import quick_interpreter

quick_interpreter.install()

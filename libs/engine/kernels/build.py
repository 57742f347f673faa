"""Compiles the C kernels once per machine and source, and loads them."""

from __future__ import annotations

import ctypes
import logging
import subprocess
from functools import cache
from pathlib import Path

from libs.common.runtime.native_build import compiled
from libs.common.runtime.native_build import find_compiler as _find_compiler

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "csrc"
# No -ffast-math: masks are infinities. Products and sums do contract to fused multiply-adds.
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-fPIC", "-shared")


@cache
def load_library() -> ctypes.CDLL | None:
    """The kernels, compiled on first use; None, after one log line, where that is not possible."""
    compiler = _find_compiler()
    if compiler is None:
        logger.warning("no C compiler found: the engine runs on plain torch, several times slower")
        return None
    try:
        return ctypes.CDLL(str(compiled(compiler, SOURCE_DIR, name="engine", flags=FLAGS)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("C kernels not usable, falling back to plain torch (several times slower): %s", detail)
        return None

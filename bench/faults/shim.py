"""Compiles a C source that LD_PRELOAD loads in front of a process's system calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def compile_shim(source: Path, library: Path) -> None:
    """Compile `source` into the shared library. Raises CalledProcessError."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "gcc", "cc", "clang"))), None)
    assert compiler is not None, "a C compiler builds this project, and its shims"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", str(source)]
    subprocess.run([*command, "-o", str(library), "-ldl"], check=True, timeout=120)

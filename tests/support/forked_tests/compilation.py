"""The compilation of test files, with their rewritten asserts, and of Hypothesis's tables, on a second core.

On a clean clone it takes longer than all else in the collection.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL
from hypothesis import strategies as st


@contextlib.contextmanager
def compiling_from_the_end(root: Path, package_root: Path) -> Iterator[None]:
    """Inside, a fork imports the files below `root`, the last first, until one is compiled already.

    The collection begins with the first file, and so the two meet. Compiled files are written whole.
    """
    files = sorted(root.rglob("test_*.py"), reverse=True)
    if (os.cpu_count() or 1) < 2 or _is_compiled(files[0]):
        yield
        return
    pid = os.fork()
    if pid == 0:
        try:
            _compile(files, package_root)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _compile(files: list[Path], package_root: Path) -> None:
    st.text().validate()  # writes the tables of characters, which take each process 1.6 s without the files
    for path in files:
        if _is_compiled(path):
            break
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection reports it
            importlib.import_module(".".join(path.relative_to(package_root).with_suffix("").parts))


def _is_compiled(path: Path) -> bool:
    compiled = path.parent / "__pycache__" / (path.stem + PYC_TAIL)
    return compiled.exists() and compiled.stat().st_mtime >= path.stat().st_mtime

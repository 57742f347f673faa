"""Builds of the C libraries that run side by side."""

from __future__ import annotations

import errno
import fcntl
import os
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "server" / "native_build.py"
PATIENCE_S = 120.0
# Notes each call, and ends it once the test lets it.
COMPILER = """#!/bin/sh
echo compiles >> {log}
until [ -e {end} ]; do sleep 0.05; done
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def waits_for_a_lock(pid: int) -> bool:
    """Whether the process is blocked in flock."""
    lines = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any(line[1:3] == ["->", "FLOCK"] and line[5] == str(pid) for line in lines)


def test_builds_side_by_side_compile_each_library_once(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    script = str(shutil.copy(SCRIPT, tmp_path / "server"))
    libraries = runpy.run_path(script)["libraries"]()
    for library in libraries:
        library.source_dir.mkdir(parents=True, exist_ok=True)
    log, end, compiler = tmp_path / "log", tmp_path / "end", tmp_path / "cc"
    compiler.write_text(COMPILER.format(log=log, end=end))
    compiler.chmod(0o755)

    def start() -> subprocess.Popen[str]:
        environment = {**os.environ, "CC": str(compiler)}
        return subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True)

    try:
        first = start()
        until(log.exists)
        second = start()
        until(lambda: waits_for_a_lock(second.pid))
    finally:
        end.touch()
    assert second.communicate(timeout=PATIENCE_S)[0] == ""
    assert first.communicate(timeout=PATIENCE_S)[0].count("compiled") == len(libraries)
    assert (first.returncode, second.returncode) == (0, 0)
    assert log.read_text().splitlines() == ["compiles"] * len(libraries)


def test_a_tree_that_cannot_be_locked_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # of NFS, for a folder

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "server").mkdir()
    script = runpy.run_path(str(shutil.copy(SCRIPT, tmp_path / "server")))
    for library in script["libraries"]():
        library.source_dir.mkdir(parents=True, exist_ok=True)
    compiler = tmp_path / "cc"
    (tmp_path / "end").touch()
    compiler.write_text(COMPILER.format(log=tmp_path / "log", end=tmp_path / "end"))
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert script["main"]() == 0
    assert all(library.is_current() for library in script["libraries"]())

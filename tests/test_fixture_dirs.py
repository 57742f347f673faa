"""Directories of long-lived fixtures are removed with them, but kept after a failed test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OF_A_FIXTURE = """
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fixture_dirs import lasting_dir


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    with lasting_dir(request, {breaks!r}) as path:
        (path / "file").write_text("text")
        yield path
        assert {breaks!r} != "end"


def test_one(folder: Path) -> None:
    assert (folder / "file").exists()
    assert {breaks!r} != "test"


def test_two(folder: Path) -> None:
    assert (folder / "file").exists()
"""


def test_a_lasting_directory_stays_only_after_a_failure(tmp_path: Path) -> None:
    for breaks in ("end", "nothing", "test", "zero"):
        (tmp_path / f"test_{breaks}.py").write_text(OF_A_FIXTURE.format(breaks=breaks))
    base = tmp_path / "base"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--rootdir", str(tmp_path), "--basetemp", str(base), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert "1 failed, 7 passed, 1 error" in done.stdout, done.stdout
    assert {path.name for path in base.iterdir() if not path.is_symlink()} == {"end0", "test0"}

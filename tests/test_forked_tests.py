"""Tests in forks of the process that collected them: what is printed, shared and cleaned up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import pytest

from tests.support.forked_tests.messages import receive

ROOT = Path(__file__).parents[1]
CONFTEST = """
import atexit, os
from pathlib import Path
import pytest

COLLECTED_BY = os.getpid()

def note(*words):
    with open(Path(__file__).with_name("notes"), "a") as notes:
        print(os.getpid(), *words, file=notes)

@pytest.fixture(scope="session", autouse=True)
def whole_session():
    atexit.register(note, "exit")
    yield
    note("session")

@pytest.fixture(scope="module", autouse=True)
def whole_file(request):
    yield
    note("file", request.path.name)
"""
COMPILES = """
import time
from tests.support.forked_tests.compilation import compiling_from_the_end

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    folder = Path(__file__).parent
    compiled = lambda: {file.name.partition(".")[0] for file in folder.glob("__pycache__/test_*")}
    before, deadline = compiled(), time.monotonic() + 60
    with compiling_from_the_end(folder, folder):
        while len(compiled()) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
    note("compiled", *sorted(compiled() - before))
    return (yield)
"""
PLAIN = """
import os, warnings
from conftest import COLLECTED_BY

def test_passes(tmp_path):
    assert os.getpid() != COLLECTED_BY == os.getppid()
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()

def test_warns(tmp_path):
    assert not list(tmp_path.iterdir())
    warnings.warn("said once")
"""
FAILS = """
import pytest

def test_fails():
    print("what it printed")
    assert 1 + 1 == 3

@pytest.mark.skip(reason="no such device")
def test_is_skipped():
    pass
"""
WAITS = """
import time
from conftest import note

def test_waits():
    note("began")
    time.sleep(60)
"""
FAILS_BESIDE = """
import time
from pathlib import Path

def test_fails():
    notes, deadline = Path(__file__).with_name("notes"), time.monotonic() + 60
    while "began" not in notes.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert False
"""
READS_LATE = """
def pytest_runtest_logreport():
    if os.getpid() == COLLECTED_BY:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
"""
DIES = """
import os, signal

def test_before():
    pass

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_after():
    pass
"""


def run(folder: Path, *options: str, more: str = "", **files: str) -> str:
    """What pytest prints in a folder with these files of tests, and `more` of a conftest."""
    (folder / "conftest.py").write_text(CONFTEST + more)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "tests.support.forked_tests.plugin"]
    command += ["-p", "no:cacheprovider", "--rootdir", str(folder), "--processes", "2", *options, str(folder)]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=300, check=False
    )
    assert not done.stderr, done.stderr
    return done.stdout


def noted(folder: Path) -> list[list[str]]:
    """What each process noted, without its process id."""
    by_process: dict[str, list[str]] = {}
    for line in (folder / "notes").read_text().splitlines():
        process, _, words = line.partition(" ")
        by_process.setdefault(process, []).append(words)
    return sorted(by_process.values())


def test_reports_are_those_of_one_process(tmp_path: Path) -> None:
    printed = run(tmp_path, a=PLAIN, b=PLAIN, c=FAILS)
    assert "1 failed, 4 passed, 1 skipped, 2 warnings in " in printed
    assert "what it printed" in printed
    assert "assert (1 + 1) == 3" in printed
    assert "UserWarning: said once" in printed
    assert re.search(r"SKIPPED \[1\] .*no such device", printed)


def test_each_fork_ends_its_files_and_its_session(tmp_path: Path) -> None:
    names = "abcdef"
    assert "12 passed" in run(tmp_path, **dict.fromkeys(names, PLAIN))
    of_forks = noted(tmp_path)
    assert 1 <= len(of_forks) <= 2
    files = []
    for notes in of_forks:
        assert notes[-2:] == ["session", "exit"]
        files += notes[:-2]
    assert sorted(files) == [f"file test_{name}.py" for name in names]


def test_a_lost_process_fails_its_test_alone(tmp_path: Path) -> None:
    printed = run(tmp_path, a=DIES, b=PLAIN)
    assert "1 failed, 4 passed" in printed
    assert "the process of the test ended: -9" in printed
    assert re.search(r"FAILED .*test_a.py::test_dies", printed)


def test_the_first_failure_may_end_all(tmp_path: Path) -> None:
    printed = run(tmp_path, "-x", a=FAILS, **dict.fromkeys("bcd", PLAIN))
    assert "stopping after 1 failures" in printed
    assert "1 failed" in printed


def test_the_first_failure_ends_the_tests_of_other_processes_in_order(tmp_path: Path) -> None:
    default = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    try:
        run(tmp_path, "-x", a=WAITS, b=FAILS_BESIDE)
    finally:
        signal.signal(signal.SIGINT, default)
    assert ["began", "file test_a.py", "session", "exit"] in noted(tmp_path)


def test_a_process_that_ends_for_a_failure_is_not_lost(tmp_path: Path) -> None:
    printed = run(tmp_path, "-x", more=READS_LATE, a="def test_passes(): pass\n" + FAILS)
    assert "1 failed, 1 passed in " in printed


def test_a_message_that_is_cut_is_the_end_of_its_process() -> None:
    ours, theirs = Pipe(duplex=False)
    with ours:
        with theirs:
            os.write(theirs.fileno(), (100).to_bytes(4, "big") + b"{")
        with pytest.raises(EOFError):
            receive(ours)


def test_an_error_of_the_collection_ends_before_any_fork(tmp_path: Path) -> None:
    printed = run(tmp_path, a=PLAIN, b="import no_such_module")
    assert "ModuleNotFoundError" in printed and "1 error" in printed
    assert not (tmp_path / "notes").exists()


def test_another_process_compiles_what_is_not_compiled_yet(tmp_path: Path) -> None:
    for n_compiled in (3, 0):
        (tmp_path / "notes").unlink(missing_ok=True)
        run(tmp_path, "--collect-only", more=COMPILES, **dict.fromkeys("abc", PLAIN))
        assert noted(tmp_path) == [[" ".join(["compiled", "test_a", "test_b", "test_c"][: 1 + n_compiled])]]

"""Tests in forks of the process that collected them: what is printed, shared and cleaned up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_tests.messages import ForkEnd, MessageReader, TestBegin, send

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
ONE_GROUP = """
from tests.support.forked_tests import parent
parent.group_of = lambda path: path.parent
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


# It leaves a process behind, which holds its pipe to the parent.
DIES_AMID_A_MESSAGE = """
import os, signal
from pathlib import Path
import conftest

def test_dies():
    left = os.fork()
    if left == 0:
        os.closerange(0, conftest.pipe)
        os.closerange(conftest.pipe + 1, 1024)
        signal.pause()
    Path(__file__).with_name("left").write_text(str(left))
    os.write(conftest.pipe, (100).to_bytes(4, "big") + b"{")
    os.kill(os.getpid(), signal.SIGKILL)
"""
KNOWS_ITS_PIPE = """
import tests.support.forked_tests.fork as fork

separate = fork._separate

def note_pipe(config, number, its_pipe):
    global pipe
    pipe = its_pipe
    separate(config, number, its_pipe)

fork._separate = note_pipe
"""
DIES_BEFORE_ITS_TESTS = """
import tests.support.forked_tests.fork as fork

separate = fork._separate

def die_once(config, number, pipe):
    if number < 2:
        os._exit(9)
    separate(config, number, pipe)

fork._separate = die_once
"""
DIES_WITH_A_FILE = """
import tests.support.forked_tests.fork as fork

send = fork.send

def die_at_a_file(pipe, message):
    if isinstance(message, fork.TestBegin) and not Path(__file__).with_name("died").exists():
        Path(__file__).with_name("died").touch()
        os._exit(9)
    send(pipe, message)

fork.send = die_at_a_file
"""
EXITS = """
import atexit, os, signal
import pytest
from conftest import note

def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    note("interrupted")

def test_exits():
    atexit.register(interrupted)
    pytest.exit("no more today", returncode=7)

def test_after():
    pass
"""
HANGS_AT_THE_END = """
import time
import tests.support.forked_tests.fork as fork

fork.SESSION_END_S = 0.5

@pytest.fixture(scope="session", autouse=True)
def endless():
    yield
    time.sleep(600)
"""
IMPORTS = """
import sys, types

def test_imports_much():
    for number in range(200):
        sys.modules[f"imported{number}"] = types.ModuleType(f"imported{number}")
"""
FINDS_IMPORTS = """
import gc, sys

def test_collections_pass_what_was_imported_over():
    visited = set(map(id, gc.get_objects()))
    assert id(sys.modules["imported0"]) not in visited
"""


def start(folder: Path, *options: str, more: str = "", **files: str) -> subprocess.Popen[str]:
    """Pytest in a folder with these files of tests, and `more` of a conftest."""
    (folder / "conftest.py").write_text(CONFTEST + more)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "tests.support.forked_tests.plugin"]
    command += ["-p", "no:cacheprovider", "--rootdir", str(folder), "--processes", "2", *options, str(folder)]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": ""}
    outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=alone, process_group=0, **outputs)


def end(started: subprocess.Popen[str]) -> tuple[str, str]:
    """What it prints, and its errors."""
    with started:
        try:
            return started.communicate(timeout=100)
        finally:
            started.kill()


def run(folder: Path, *options: str, more: str = "", **files: str) -> str:
    """What pytest prints, without errors."""
    printed, printed_errors = end(start(folder, *options, more=more, **files))
    assert not printed_errors, printed_errors
    return printed


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


def test_one_process_runs_the_files_of_a_group(tmp_path: Path) -> None:
    run(tmp_path, more=ONE_GROUP, **dict.fromkeys("abcdef", PLAIN))
    (of_all,) = [notes for notes in noted(tmp_path) if any(note.startswith("file") for note in notes)]
    assert of_all[:-2] == [f"file test_{name}.py" for name in "abcdef"]


def test_collections_pass_over_what_an_earlier_file_imported(tmp_path: Path) -> None:
    assert "2 passed" in run(tmp_path, "--processes", "1", a=IMPORTS, b=FINDS_IMPORTS)


def test_a_lost_process_fails_its_test_alone(tmp_path: Path) -> None:
    printed = run(tmp_path, a=DIES, b=PLAIN)
    assert "1 failed, 4 passed" in printed
    assert "the process of the test ended: -9" in printed
    assert re.search(r"FAILED .*test_a.py::test_dies", printed)


def test_a_process_that_is_lost_amid_a_message_is_heard_no_more(tmp_path: Path) -> None:
    started = start(tmp_path, more=KNOWS_ITS_PIPE, a=DIES_AMID_A_MESSAGE, b=PLAIN)
    try:
        printed, _ = end(started)
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert "1 failed, 2 passed" in printed
    assert re.search(r"FAILED .*test_a.py::test_dies", printed)


def test_a_process_that_is_lost_before_its_first_test_names_none(tmp_path: Path) -> None:
    printed = run(tmp_path, more=DIES_BEFORE_ITS_TESTS, a=PLAIN, b=PLAIN)
    assert "2 failed, 4 passed" in printed
    lost = re.findall(r"FAILED .*(process . of the tests)", printed)
    assert sorted(lost) == ["process 0 of the tests", "process 1 of the tests"]
    assert printed.count("it ended outside of a test: 9") >= 2


def test_a_file_that_was_lost_with_its_process_runs_all_the_same(tmp_path: Path) -> None:
    printed = run(tmp_path, more=DIES_WITH_A_FILE, a=PLAIN, b=PLAIN, c=PLAIN)
    assert "1 failed, 6 passed" in printed
    assert re.search(r"FAILED .*process . of the tests", printed)


def test_a_test_may_end_the_session(tmp_path: Path) -> None:
    """The interrupt, with which the parent answers, ends none of the fork's exit functions."""
    started = start(tmp_path, a=EXITS)
    printed, printed_errors = end(started)
    assert "no more today" in printed and not printed_errors
    assert started.returncode == 7 and "failed" not in printed
    assert noted(tmp_path)[0][-3:] == ["session", "interrupted", "exit"]


def test_fixtures_of_a_session_that_hang_end_their_process(tmp_path: Path) -> None:
    printed, printed_errors = end(start(tmp_path, more=HANGS_AT_THE_END, a=PLAIN))
    assert "1 failed, 2 passed" in printed
    assert re.search(r"FAILED .*process 0 of the tests", printed)
    assert "it ended outside of a test: 1" in printed
    assert "in endless" in printed_errors


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_interrupt_reaches_the_forks_once(tmp_path: Path, is_terminal: bool) -> None:
    """A terminal interrupts a group of processes; `kill` the parent alone."""
    default = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell in the background ignores it
    try:
        started = start(tmp_path, a=WAITS)
    finally:
        signal.signal(signal.SIGINT, default)
    deadline = time.monotonic() + 60
    notes = tmp_path / "notes"
    while not (notes.exists() and notes.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    (os.killpg if is_terminal else os.kill)(started.pid, signal.SIGINT)
    printed, _ = end(started)
    assert "KeyboardInterrupt" in printed
    assert noted(tmp_path) == [["began", "file test_a.py", "session", "exit"]]


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


def test_messages_are_read_without_a_wait() -> None:
    ours, theirs = os.pipe()  # what a fork left may keep `theirs` open, also amid a message
    reader = MessageReader(ours)
    assert list(reader.read()) == []
    send(theirs, TestBegin(1))
    send(theirs, ForkEnd())
    os.write(theirs, (100).to_bytes(4, "big") + b"{")
    assert list(reader.read()) == [TestBegin(1), ForkEnd()]
    assert list(reader.read()) == []
    os.close(theirs)
    assert list(reader.read()) == []
    reader.close()


def test_an_error_of_the_collection_ends_before_any_fork(tmp_path: Path) -> None:
    printed = run(tmp_path, a=PLAIN, b="import no_such_module")
    assert "ModuleNotFoundError" in printed and "1 error" in printed
    assert not (tmp_path / "notes").exists()


def test_another_process_compiles_what_is_not_compiled_yet(tmp_path: Path) -> None:
    for n_compiled in (3, 0):
        (tmp_path / "notes").unlink(missing_ok=True)
        run(tmp_path, "--collect-only", more=COMPILES, **dict.fromkeys("abc", PLAIN))
        assert noted(tmp_path) == [[" ".join(["compiled", "test_a", "test_b", "test_c"][: 1 + n_compiled])]]

"""A fork of the process that collected the tests: it runs files of them, and reports to its parent."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence

import pytest
from _pytest.config import create_terminal_writer

from supervisor.exec_guard import die_with_parent
from tests.support.forked_tests.messages import (
    ForkEnd,
    ReportMessage,
    SessionExit,
    TestBegin,
    WarningMessage,
    send,
)

# The end of a session's fixtures belongs to no test, whose time-out would bound it.
SESSION_END_S = 300.0
# So many modules have some ten thousand objects, which take a full collection a few milliseconds.
_FEW_MODULES = 100


class EndOfFile(pytest.Item):
    """What comes after the last item of a file: an item that shares the session's fixtures alone."""

    def runtest(self) -> None:
        """Nothing runs it."""


class SilentTerminal:
    """Stands for pytest's terminal reporter, whose writer plugins ask for. The parent has the real one."""

    def __init__(self, config: pytest.Config) -> None:
        self._tw = create_terminal_writer(config, open(os.devnull, "w"))  # noqa: SIM115  # as long as the fork


class Reporting:
    """The plugin of pytest that sends reports and warnings to the parent."""

    def __init__(self, config: pytest.Config, pipe: int) -> None:
        self._config = config
        self._pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call" and not self._config.option.durations:
            return  # pytest prints and counts nothing of it
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        send(self._pipe, ReportMessage(data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str
    ) -> None:
        if when != "runtest":
            return  # the parent has it
        text, category = str(warning_message.message), warning_message.category.__name__
        where = warning_message.filename, warning_message.lineno
        send(self._pipe, WarningMessage(text, category, *where, nodeid))


def run_fork(
    session: pytest.Session,
    number: int,
    files: Iterable[Sequence[int]],
    pipe: int,
    parent_pid: int,
) -> None:
    """Run the items with these indices, one file after the other, and end this process."""
    code = 1
    try:
        # What the parent has to do at its end, a fork of it has not.
        atexit._clear()
        die_with_parent(parent_pid)
        os.setpgid(0, 0)  # a terminal interrupts the parent alone, which interrupts its forks
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
        _separate(session.config, number, pipe)
        _run(session, files, pipe)
        code = 0
    except pytest.exit.Exception as ended:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent interrupts its forks when it reads this
        send(pipe, SessionExit(ended.msg, ended.returncode))
        code = 0
    except KeyboardInterrupt:
        pass  # the parent prints why
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            atexit._run_exitfuncs()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # The interpreter would visit every object, and so copy the memory that forks share.
            os._exit(code)


def _separate(config: pytest.Config, number: int, pipe: int) -> None:
    """Share no file with the parent and the other forks that both write."""
    manager = config.pluginmanager
    capture = manager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture(in_=True)
    directories = config._tmp_path_factory  # type: ignore[attr-defined]
    directories._given_basetemp = directories.getbasetemp() / f"fork-{number}"
    directories._basetemp = None
    # Plugins that write a file at the end, such as the cache, leave that to the process without this input.
    config.workerinput = {"workerid": f"fork{number}"}  # type: ignore[attr-defined]
    manager.unregister(name="terminalreporter")
    manager.register(SilentTerminal(config), "terminalreporter")
    manager.register(Reporting(config, pipe))


def _run(session: pytest.Session, files: Iterable[Sequence[int]], pipe: int) -> None:
    end = EndOfFile.from_parent(session, name="end of file")
    exempt = len(sys.modules)
    try:
        for file in files:
            exempt = _exempt_imports(exempt)
            for index, after in zip(file, [*file[1:], None], strict=True):
                send(pipe, TestBegin(index))
                item, next_item = session.items[index], end if after is None else session.items[after]
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
                if session.shouldfail or session.shouldstop:
                    return
        send(pipe, ForkEnd())
    finally:
        # A fixture that hangs ends the process, which prints where its threads are.
        faulthandler.dump_traceback_later(SESSION_END_S, exit=True)
        session._setupstate.teardown_exact(None)
        faulthandler.cancel_dump_traceback_later()


def _exempt_imports(exempt: int) -> int:
    """Exempt modules that tests have imported from later garbage collections, as the collected ones are.

    Those of transformers and torch make one collection take 0.2 s. `exempt`: the number of modules that are
    exempt; returns it.
    """
    if len(sys.modules) < exempt + _FEW_MODULES:
        return exempt
    gc.collect()
    gc.freeze()
    return len(sys.modules)

"""The process that collected the tests: it forks, hands out files, and replays what forks report."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait

import pytest

from tests.support.file_order import group_of
from tests.support.forked_tests.fork import run_fork
from tests.support.forked_tests.messages import ForkEnd, MessageReader, SessionExit, TestBegin, replay

_END_S = 10.0
_INDEX_BYTES = 4


class FileQueue:
    """Numbers of files in a pipe, from which each fork takes the next one."""

    def __init__(self, n_files: int) -> None:
        """A pipe holds 64 KiB before someone reads: 16,384 files."""
        self._reader, writer = os.pipe()
        with open(writer, "wb") as pipe:
            pipe.writelines(number.to_bytes(_INDEX_BYTES, "big") for number in range(n_files))

    def __iter__(self) -> Iterator[int]:
        """Take numbers until none is left. Several processes may do so."""
        while number := os.read(self._reader, _INDEX_BYTES):
            yield int.from_bytes(number, "big")


class TestFork:
    """A running fork from the side of its parent."""

    __test__ = False

    def __init__(self, number: int, pid: int, reader: MessageReader, item: int | None) -> None:
        self.number = number
        self.reader = reader
        self.item = item  # that it runs, or begins with
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.waited_for = (reader.fileno(), self._pidfd)

    def is_running(self) -> bool:
        """Whether the fork has not ended."""
        return not wait([self._pidfd], 0)

    def interrupt(self) -> None:
        """Have the fork tear its test down and end."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGINT)

    def end(self, *, timeout_s: float) -> int:
        """Wait for the end, kill the fork at the deadline, and return its exit code."""
        if not wait([self._pidfd], timeout_s):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        os.close(self._pidfd)
        self.reader.close()
        return os.waitstatus_to_exitcode(status)


class ForkedRun:
    """All items of a session, run by forks."""

    def __init__(self, session: pytest.Session, n_forks: int) -> None:
        self._session = session
        indices = range(len(session.items))
        grouped = itertools.groupby(indices, key=lambda index: group_of(session.items[index].path))
        self._files = [list(file) for _, file in grouped]
        self._queue = FileQueue(len(self._files))
        self._begun: set[int] = set()  # items, also of forks that were lost before
        self._numbers = itertools.count()
        self._forks: list[TestFork] = []
        self._n_forks = n_forks
        # The forks make their temporary directories in this one.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]

    def run(self) -> None:
        """Return at the end of all items. Raises as pytest's own loop: Failed, Interrupted."""
        if threading.active_count() > 1:
            raise RuntimeError(f"files of tests start threads, which forks lack: {threading.enumerate()}")
        try:
            for _ in range(min(self._n_forks, len(self._files))):
                self._fork([])
            while self._forks or self._fork_for_left_file():
                ready = wait([each for fork in self._forks for each in fork.waited_for])
                for fork in [fork for fork in self._forks if not set(ready).isdisjoint(fork.waited_for)]:
                    self._hear(fork)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            self._end()

    def _end(self) -> None:
        """Let the forks that run end what their tests started."""
        deadline_s = time.monotonic() + _END_S
        for fork in self._forks:
            fork.interrupt()
        for fork in self._forks:
            fork.end(timeout_s=max(0.0, deadline_s - time.monotonic()))

    def _fork(self, first: Sequence[int]) -> None:
        """Start a fork, which runs these items before it takes files."""
        number = next(self._numbers)
        ours, theirs = os.pipe()
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            files = (self._files[taken] for taken in self._queue)
            run_fork(
                self._session, number, itertools.chain([first] if first else [], files), theirs, parent_pid
            )
        os.close(theirs)
        self._forks.append(TestFork(number, pid, MessageReader(ours), first[0] if first else None))

    def _fork_for_left_file(self) -> bool:
        """Start a fork for a file that lost ones left in the queue, or took without a begin. False: none."""
        in_queue = [self._files[number] for number in itertools.islice(self._queue, 1)]
        taken = (file for file in self._files if file[0] not in self._begun)
        file = next(itertools.chain(in_queue, taken), None)
        if file is not None:
            self._fork(file)
        return file is not None

    def _hear(self, fork: TestFork) -> None:
        """Replay what has come of a fork, until a report ends the session; after its end, all."""
        has_ended = not fork.is_running()
        for message in fork.reader.read():
            if isinstance(message, TestBegin):
                fork.item = message.item
                self._begun.add(message.item)
            elif isinstance(message, ForkEnd):
                fork.item = None
            elif isinstance(message, SessionExit):
                raise pytest.exit.Exception(message.reason, message.returncode)
            else:
                replay(message, self._session.config)
            if not has_ended and (self._session.shouldfail or self._session.shouldstop):
                return
        if has_ended:
            self._forks.remove(fork)
            self._after(fork)

    def _after(self, fork: TestFork) -> None:
        """Report what a fork was lost with, and have another one run the rest of its file."""
        code = fork.end(timeout_s=0)
        if code == 0 and (fork.item is None or self._session.shouldfail or self._session.shouldstop):
            return  # it has run all, or ended for the same reports
        if fork.item is None:  # before it began a test, or at the end of the session's fixtures
            name = f"process {fork.number} of the tests"
            self._report_loss(name, (name, None, name), f"it ended outside of a test: {code}")
            return
        item = self._session.items[fork.item]
        self._report_loss(item.nodeid, item.location, f"the process of the test ended: {code}")
        self._begun.add(fork.item)
        file = next(file for file in self._files if fork.item in file)
        self._fork(file[file.index(fork.item) + 1 :])

    def _report_loss(self, nodeid: str, location: tuple[str, int | None, str], text: str) -> None:
        report = pytest.TestReport(nodeid, location, {}, "failed", text, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)

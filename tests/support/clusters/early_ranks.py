"""Ranks of a worker's group as forks that rank 0 makes before it has threads: a start imports nothing again.

They run the same module as ranks that `libs.engine.parallel.follower_processes` starts by exec.
tests/engine/parallel and a worker of tests/e2e/fleet/test_parallel.py start ranks by exec.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from typing import TextIO

from libs.common.telemetry.logs import log_form
from libs.engine.parallel import follower_processes
from libs.engine.parallel.rank_model import RankOptions
from libs.engine.parallel.sizes import parse_sizes

# Above the descriptors of rank 0 that the options name.
_HIGH_DESCRIPTOR = 500
_MAX_FORM_BYTES = 100


class EarlyRank:
    """What `FollowerProcesses` uses of a Popen. The process waits until `begin`."""

    def __init__(self, earlier: list[EarlyRank]) -> None:
        """`earlier`: ranks of the same process, whose inputs the new process must not keep open."""
        self._rank_0 = os.getpid()
        reads, writes = os.pipe()
        self._control, control = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._control.close()
            os.close(writes)
            for rank in earlier:
                rank.forget()
            self._wait_and_follow(control, reads)
        control.close()
        os.close(reads)
        self.stdin: TextIO = os.fdopen(writes, "w")
        self._status = 0
        self._ended = threading.Event()

    def begin(self, options: RankOptions) -> None:
        """Let the process be a rank with these options."""
        threading.Thread(target=self._reap, name=f"early rank {self.pid}", daemon=True).start()
        with self._control as control:
            socket.send_fds(control, [log_form().encode()], [options.store, options.pages])
            socket.send_fds(control, [f"{options.store} {options.pages}".encode()], [])
        self.stdin.write(options.to_json() + "\n")
        self.stdin.flush()

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self._status

    def kill(self) -> None:
        """SIGKILL."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def forget(self) -> None:
        """Close this process's ends of the rank's files."""
        self._control.close()
        self.stdin.close()

    def _reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self._status = os.waitstatus_to_exitcode(status)
        self._ended.set()

    def _wait_and_follow(self, control: socket.socket, reads: int) -> None:
        """In the new process: become the follower. Does not return."""
        try:
            form, files, _, _ = socket.recv_fds(control, _MAX_FORM_BYTES, 2)
            if form:
                numbers = map(int, control.recv(_MAX_FORM_BYTES).split())
                high = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH_DESCRIPTOR) for file in (reads, *files)]
                for file in (control.detach(), reads, *files):
                    os.close(file)
                for file, number in zip(high, (0, *numbers), strict=True):
                    os.dup2(file, number)
                    os.close(file)
                sys.argv = ["-m", form.decode(), str(self._rank_0)]
                runpy.run_module(follower_processes._MODULE, run_name="__main__", alter_sys=True)
        finally:
            os._exit(1)  # rank 0 has ended, or the module failed: it ends the process itself otherwise


def install(arguments: list[str]) -> None:
    """Fork the ranks that `--parallel` in these arguments states. The process must have one thread."""
    sizes = parse_sizes(arguments[len(arguments) - 1 - arguments[::-1].index("--parallel") + 1])
    ranks: list[EarlyRank] = []
    for _ in range(1, sizes.n_ranks):
        ranks.append(EarlyRank(ranks))

    def start(options: RankOptions) -> EarlyRank:
        rank = ranks.pop(0)
        rank.begin(options)
        return rank

    vars(follower_processes)["_start"] = start

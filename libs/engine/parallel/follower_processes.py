"""The processes of the ranks other than 0, as rank 0 starts and watches them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from libs.common.telemetry.logs import log_form
from libs.engine.parallel.rank_model import RankOptions

_END_TIMEOUT_S = 4.0  # for all ranks; a worker that stops waits 5 s for its engine
_MODULE = "libs.engine.parallel.follower"


class FollowerProcesses:
    """Started at once. Each ends when its standard input closes, which the end of rank 0 does.

    The kernel kills one that does not read by then, such as a stopped one. It does so at the end of the
    thread that makes this object, which is the engine's.
    """

    def __init__(self, options: RankOptions, on_death: Callable[[str], None]) -> None:
        self._options = options
        self._on_death = on_death
        self._is_ending = False
        self.processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(1, options.sizes.n_ranks):
                self.processes.append(_start(replace(options, rank=rank)))
        except BaseException:
            self.kill()
            raise
        for rank, process in enumerate(self.processes, start=1):
            threading.Thread(
                target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True
            ).start()

    def expect_end(self) -> None:
        """Let the end of a rank be no failure from now on."""
        self._is_ending = True

    def wait(self) -> None:
        """Wait for the end of all ranks; kill those that stay."""
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline_s - time.monotonic(), 0.0))
        self.kill()

    def kill(self) -> None:
        self.expect_end()
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()

    def _watch(self, rank: int, process: subprocess.Popen[str]) -> None:
        status = process.wait()
        if not self._is_ending:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            self._on_death(f"rank {rank} of {self._options.sizes} {how}: the worker ends with it")


def _start(options: RankOptions) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE, log_form(), str(os.getpid())],
        stdin=subprocess.PIPE,
        pass_fds=(options.store, options.pages),
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(options.to_json() + "\n")
    process.stdin.flush()
    return process

"""A child process with a deadline: at its end everything that the child started is killed."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence


class BoundedProcess:
    """Runs a command in a new process group. `status` is None where the deadline ended it."""

    def __init__(self, command: Sequence[str], limit_s: float) -> None:
        self._command = list(command)
        self._limit_s = limit_s
        self.status: int | None = None

    def lines(self) -> Iterator[str]:
        """The lines of standard output as they come, until the child ends or is killed."""
        deadline_s = time.monotonic() + self._limit_s
        process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        found: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process, found), name="output", daemon=True)
        reader.start()
        try:
            while (line := found.get(timeout=max(deadline_s - time.monotonic(), 0.0))) is not None:
                yield line
            self.status = process.wait(timeout=max(deadline_s - time.monotonic(), 1.0))
        except (queue.Empty, subprocess.TimeoutExpired):
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):  # the whole group has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(process: subprocess.Popen[str], found: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            found.put(line.rstrip("\n"))
    found.put(None)

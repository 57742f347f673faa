"""`slipstream chat` in a pseudo terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAIT_S = 60.0


class PseudoTerminal:
    """Types keys and reads what the screen gets."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self._process = process
        self._descriptor = descriptor
        self._unread = ""

    def type(self, keys: str) -> None:
        """Send keys as a terminal does."""
        os.write(self._descriptor, keys.encode())

    def until(self, text: str) -> None:
        """Read up to the text. Raises AssertionError at the deadline."""
        self.until_true(lambda: text in self._unread)
        self._unread = self._unread.partition(text)[2]

    def until_true(self, condition: Callable[[], bool]) -> None:
        """Read until the condition is true. Raises AssertionError at the deadline."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self._unread
            if select.select([self._descriptor], [], [], 0.05)[0]:
                self._unread += os.read(self._descriptor, 65_536).decode(errors="replace")

    def end(self) -> int:
        """The exit code at the end."""
        return self._process.wait(WAIT_S)


@contextmanager
def chat_in_a_terminal(endpoint: str) -> Iterator[PseudoTerminal]:
    """The command with a terminal as its input and output."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", "chat", "--endpoint", endpoint],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield PseudoTerminal(process, ours)
    finally:
        process.kill()
        process.wait(WAIT_S)
        os.close(ours)

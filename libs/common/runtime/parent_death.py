"""The end of a process with its parent, by the kernel (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends.

    Raises OSError; SystemExit where the parent has ended already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise SystemExit("the parent process has ended")

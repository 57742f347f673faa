"""Become a command that the kernel kills when its parent dies (Linux).

    python -I -S exec_guard.py PARENT_PID COMMAND [ARGUMENT...]

Run by path, without the site packages, because it runs before every process of the cluster. It sets
PR_SET_PDEATHSIG and then execs, which keeps the setting; a code that ran between fork and exec in the
parent could deadlock there. If the parent died before the setting took hold, its pid is no longer
ours to find as parent, and the command is not run. `libs.common.runtime.parent_death` does the same, but a
script without the site packages imports no library.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies. Raises OSError; SystemExit if it is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise SystemExit("the supervisor is gone")


def main() -> None:
    """Guard, check, exec."""
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(parent_pid)
    # Python ignores SIGPIPE, and an ignored signal stays ignored over exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise SystemExit(f"cannot run {command[0]}: {error.strerror}") from None


if __name__ == "__main__":
    main()

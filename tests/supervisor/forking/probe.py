"""A module that says what a process is, and then ends as its argument says."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import resource
import signal
import sys
import threading
import time

import numpy.random

_PR_GET_PDEATHSIG = 2


class _Fragile:
    """Says that it is destroyed, if the process does so at its end."""

    def __init__(self) -> None:
        self.says = sys.argv[-1:] == ["keep"]
        self._write = os.write  # the module's names are gone then

    def __del__(self) -> None:
        if self.says:
            self._write(1, b"destroyed\n")


_fragile = _Fragile()


@atexit.register
def _end_of_import(importer: str = __name__) -> None:
    """A handler of the import, which a fork server makes before its forks."""
    if sys.argv[-1:] == ["keep"]:
        print(f"end of {importer}", flush=True)


def facts() -> dict[str, object]:
    """What must be equal however the process began."""
    death_signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(death_signal), 0, 0, 0)
    umask = os.umask(0)
    os.umask(umask)
    with open("/proc/self/cmdline", "rb") as file:
        command = file.read().rstrip(b"\0").replace(b"\0", b" ").decode()
    with open("/proc/self/comm", encoding="ascii") as file:
        name = file.read()
    return {
        "arguments": sys.argv,
        "main": [__name__, getattr(sys.modules["__main__"], "__file__", None)],
        "path": sys.path,
        "directory": os.getcwd(),
        "environment": dict(os.environ),
        "leads_session": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "parent": os.getppid(),
        "death_signal": death_signal.value,
        "files": {number: os.path.realpath(f"/proc/self/fd/{number}") for number in (0, 1, 2)},
        "n_files": len(os.listdir("/proc/self/fd")),
        "limits": {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT" in name
        },
        "umask": umask,
        "priority": os.nice(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "handlers": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "threads": [thread.name for thread in threading.enumerate()],
        "collects": [gc.isenabled(), gc.get_threshold()],
        "buffers": [
            sys.stdout.line_buffering,
            getattr(sys.stdout, "write_through", None),
            sys.stdout.encoding,
            sys.stderr.errors,
        ],
        "flags": str(sys.flags),
        "command": command,
        "name": name,
    }


def main() -> None:
    """Print the facts, and a number that no other process has; then end."""
    drawn = numpy.random.random()
    print(json.dumps({"pid": os.getpid(), "drawn": drawn, "facts": facts()}), flush=True)
    atexit.register(print, "at exit", flush=True)
    how = sys.argv[1]
    if how == "exit":
        sys.exit(3)
    if how == "say":
        sys.exit("some words")
    if how == "raise":
        raise ValueError("no way")
    if how == "abort":
        os.abort()
    if how == "breed" and os.fork() == 0:
        print(os.getpid(), flush=True)
    while how in ("wait", "breed"):
        time.sleep(60)


if __name__ == "__main__":
    main()

"""What the end of a process means by its exit code, which is negative for a signal.

A crash is a non-zero exit code or a signal such as SIGSEGV or SIGABRT. Exit code 0 is an orderly end.
SIGKILL, SIGTERM, SIGINT and SIGHUP are sent from outside; of these only the kernel's SIGKILL for lack of
memory is a crash.
"""

from __future__ import annotations

import signal
from pathlib import Path

from libs.common.worker_bounds import HUNG_STATUS

# The exit code of a process that cannot use its model: another start would fail in the same way.
MODEL_UNUSABLE = 78
HUNG = HUNG_STATUS
_EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Files with the counts of this container (cgroup v2), or else of the whole kernel.
_OOM_COUNTS = ((Path("/sys/fs/cgroup/memory.events"), "oom_kill"), (Path("/proc/vmstat"), "oom_kill"))


def is_crash(code: int, *, oom_kills: int) -> bool:
    """Whether an exit code means a crash. Pure.

    `oom_kills`: how many processes the kernel killed for lack of memory while this one ran.
    """
    return (
        code > 0
        or (code < 0 and -code not in _EXTERNAL_SIGNALS)
        or (-code == signal.SIGKILL and oom_kills > 0)
    )


def count_oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory so far; 0 where it does not count them."""
    for path, name in _OOM_COUNTS:
        try:
            rows = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        except (OSError, ValueError):
            continue
        if name in rows:
            return int(rows[name])
    return 0

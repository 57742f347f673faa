"""Lets a process have as many open files as it has bounds for connections."""

from __future__ import annotations

import resource

# More than all bounds of a process's connections together.
_MOST_FILES = 65_536


def raise_file_limit() -> int:
    """Raise the soft limit of open files as far as the hard one allows; returns the limit that holds.

    Shells and systemd give 1,024, which one client's connections use up: then no other client connects.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, min(hard, _MOST_FILES))
    if wanted != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted

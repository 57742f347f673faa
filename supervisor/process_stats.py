"""The facts of /proc about a process: when it began, its memory, its children."""

from __future__ import annotations

import os
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot (Linux); None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may hold spaces and parentheses itself.
    return int(stat.rpartition(b")")[2].split()[19])


def is_same_process(pid: int, ticks: int | None) -> bool:
    """Whether `pid` still is the process that was recorded."""
    return ticks is not None and start_ticks(pid) == ticks


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared pages included; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """Pids of a process's children; none if it is gone."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in listed.read_text().split()]
        except OSError:  # that thread has ended
            continue
    return found

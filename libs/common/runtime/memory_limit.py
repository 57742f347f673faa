"""The memory that this process may use: the machine's, or less by the limit of its container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROC_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def memory_limit_bytes(proc_cgroup: Path = _PROC_CGROUP, root: Path = _CGROUP_ROOT) -> int:
    """The least of the machine's memory and the limits of this process's cgroups, v1 and v2."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:  # no Linux
        lines = []
    for file in _limit_files(lines, root):
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # no such controller; v2 says "max" for no limit
            continue
    return min(limits)


def _limit_files(lines: list[str], root: Path) -> Iterator[Path]:
    """The files of the process's groups and of all above them, whose limits hold as well.

    A container may see its own group as the root, or the path that the host gave it: both are tried.
    """
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:  # v2; beside v1 it is mounted in `unified`
            folders, name = [root, root / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            folders, name = [root / "memory"], "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in folders:
            for part in (group, *group.parents):
                if ".." not in part.parts:
                    yield folder / part / name

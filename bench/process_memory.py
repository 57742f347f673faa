"""The memory of other processes."""

from __future__ import annotations

from pathlib import Path


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))

"""Checks of running processes, and waits for them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from tests.support.processes.launching import ServiceProcess


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def suspend(process: subprocess.Popen[Any] | ServiceProcess) -> None:
    """SIGSTOP. Returns when every thread has stopped."""
    process.send_signal(signal.SIGSTOP)
    deadline_s = time.monotonic() + 60
    while not is_stopped(process.pid):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"process {process.pid} did not stop")
        time.sleep(0.01)


def is_stopped(pid: int) -> bool:
    """Whether every thread has stopped: until then one may still answer."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # a thread has ended meanwhile
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def mentioning(text: str) -> set[int]:
    """Pids of running processes whose command line holds `text`."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "cmdline").read_bytes() and alive(int(folder.name)):
                found.add(int(folder.name))
        except OSError:
            continue
    return found


async def eventually(condition: Callable[[], object], *, timeout_s: float = 100.0) -> None:
    """Return when `condition` holds. TimeoutError if it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.05)


async def all_gone(pids: Collection[int], *, timeout_s: float = 100.0) -> None:
    """Return when none of the processes runs."""
    await eventually(lambda: not any(alive(pid) for pid in pids), timeout_s=timeout_s)

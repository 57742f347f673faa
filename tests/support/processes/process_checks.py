"""Checks of running processes, and waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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

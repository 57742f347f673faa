"""The end of ranks with rank 0, also of one that is stopped and reads nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from tests.support.processes.process_checks import all_gone, eventually

# Rank 0 that starts a rank which then waits for it. Its memory of pages shows how far that one is.
RANK_0 = """
import os, sys
from pathlib import Path
from libs.engine.parallel.follower_processes import FollowerProcesses
from tests.engine.parallel.test_follower_logs import options_that_fail

options = options_that_fail(Path("none"))
os.ftruncate(options.pages, options.cache.n_pages * options.cache.page_bytes)
(rank,) = FollowerProcesses(options, print).processes
print(rank.pid, flush=True)
sys.stdin.read()
"""


def has_pages(pid: int) -> bool:
    return "memfd:pages" in Path(f"/proc/{pid}/maps").read_text()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def test_a_stopped_rank_ends_with_rank_0() -> None:
    rank_0 = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RANK_0), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert rank_0.stdout is not None
    try:
        async with asyncio.timeout(100):
            rank = int(await rank_0.stdout.readline())
        await eventually(lambda: has_pages(rank))
        os.kill(rank, signal.SIGSTOP)
        await eventually(lambda: is_stopped(rank))
    finally:
        rank_0.kill()
        await rank_0.wait()
    await all_gone([rank])

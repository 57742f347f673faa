"""The end of other ranks: with rank 0, where one is stopped and reads nothing, and where one stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from libs.engine.parallel import follower_processes
from libs.engine.parallel.follower_processes import FollowerProcesses
from libs.engine.parallel.sizes import parse_sizes
from tests.support.processes.process_checks import all_gone, eventually, is_stopped

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


class StuckRank:
    """A rank that ends when it is killed. Waits with a time-out move the clock."""

    stdin = None

    def __init__(self, clock: StuckClock) -> None:
        self._clock = clock
        self._killed = threading.Event()

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            self._killed.wait()
        elif not self._killed.is_set():
            self._clock.now_s += timeout
            raise subprocess.TimeoutExpired("rank", timeout)
        return -9

    def kill(self) -> None:
        self._killed.set()


class StuckClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def test_ranks_that_stay_are_killed_after_one_time_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, deaths = StuckClock(), list[str]()
    monkeypatch.setattr(follower_processes, "time", clock)
    monkeypatch.setattr(follower_processes, "replace", lambda options, rank: options)
    monkeypatch.setattr(follower_processes, "_start", lambda options: StuckRank(clock))
    options: Any = type("Options", (), {"sizes": parse_sizes("tp=8")})()
    ranks = FollowerProcesses(options, deaths.append)
    assert len(ranks.processes) == 7
    ranks.expect_end()
    ranks.wait()
    assert clock.now_s - 100.0 == pytest.approx(follower_processes._END_TIMEOUT_S)
    assert [rank.wait() for rank in ranks.processes] == [-9] * 7
    assert deaths == []

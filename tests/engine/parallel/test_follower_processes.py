"""The end of ranks that do not end by themselves."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import pytest

from libs.engine.parallel import follower_processes
from libs.engine.parallel.follower_processes import FollowerProcesses
from libs.engine.parallel.sizes import parse_sizes


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

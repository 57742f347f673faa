"""How a process ended tells whether it broke."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from libs.common.cluster.exit_reports import (
    EtcdExitReports,
    NoExitReports,
    broke_by_itself,
    count_oom_kills,
    report_death,
    run_name,
)
from libs.common.cluster.worker_record import Role
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.messages import EtcdUnavailable, Swap, SwapOutcome
from tests.support.etcd_process import EtcdProcess


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path) as process:
        yield process


@pytest.mark.parametrize(
    ("code", "oom_kills", "broke"),
    [
        (-signal.SIGSEGV, 0, True),
        (-signal.SIGABRT, 0, True),
        (-signal.SIGBUS, 0, True),
        (1, 0, True),
        (-signal.SIGKILL, 0, False),
        (-signal.SIGTERM, 0, False),
        (-signal.SIGKILL, 1, True),  # it had eaten up the memory
        (-signal.SIGTERM, 1, False),
        (0, 0, False),  # in order, by whatever it was told to
        (0, 1, False),
    ],
)
def test_who_broke(code: int, oom_kills: int, broke: bool) -> None:
    assert broke_by_itself(code, oom_kills=oom_kills) is broke
    assert count_oom_kills() >= 0


async def test_a_report_reaches_who_asks_and_is_of_that_run_alone(etcd: EtcdProcess) -> None:
    run, next_run = (run_name(Role.DECODE, "decode-0", name) for name in ("run-1", "run-2"))
    client = EtcdClient([etcd.endpoint])
    deaths = EtcdExitReports(client, wait_s=30.0)
    try:
        await report_death(client, run, broke=False)
        assert await deaths.broke(run) is False
        await report_death(client, run, broke=True)  # it ended once
        assert await deaths.broke(run) is False
        assert await EtcdExitReports(client, wait_s=0.05).broke(next_run) is None
        await report_death(client, next_run, broke=True)
        assert await deaths.broke(next_run) is True
        assert await deaths.broke(run) is False
        assert await EtcdExitReports(client, wait_s=0.05).broke("decode/decode-0/run-0") is None
        assert await NoExitReports().broke(run) is None
    finally:
        await client.close()


class OneLost(EtcdClient):
    """Its first change fails, as at a member that leaves: before it is made, or after."""

    made_first: bool
    lost = 0

    async def swap(self, swaps: Sequence[Swap]) -> SwapOutcome:
        if self.lost:
            return await super().swap(swaps)
        if self.made_first:
            await super().swap(swaps)
        self.lost += 1
        raise EtcdUnavailable("GOAWAY received")


@pytest.mark.parametrize("made_first", [True, False])
async def test_a_report_outlives_the_member_that_it_was_told(etcd: EtcdProcess, made_first: bool) -> None:
    run = run_name(Role.DECODE, "decode-0", "run-1")
    client = OneLost([etcd.endpoint], timeout_s=60.0)
    client.made_first = made_first
    try:
        await report_death(client, run, broke=True)
        assert client.lost == 1
        assert await EtcdExitReports(client, wait_s=30.0).broke(run) is True
    finally:
        await client.close()

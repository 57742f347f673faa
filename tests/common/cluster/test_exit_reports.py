"""Exit reports: how they reach etcd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from libs.common.cluster import exit_reports
from libs.common.cluster.exit_reports import (
    CrashedAttempts,
    EtcdExitReports,
    NoExitReports,
    report_exit,
    run_name,
)
from libs.common.cluster.worker_record import Role
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.messages import EtcdUnavailable, Swap, SwapOutcome
from tests.support.processes.etcd_process import EtcdProcess


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path) as process:
        yield process


async def test_an_exit_report_belongs_to_one_incarnation(etcd: EtcdProcess) -> None:
    run, next_run = (run_name(Role.DECODE, "decode-0", name) for name in ("run-1", "run-2"))
    client = EtcdClient([etcd.endpoint])
    deaths = EtcdExitReports(client, wait_s=30.0)
    try:
        await report_exit(client, run, crashed=False)
        assert await deaths.has_crashed(run) is False
        await report_exit(client, run, crashed=True)  # a process ends only once
        assert await deaths.has_crashed(run) is False
        assert await EtcdExitReports(client, wait_s=0.05).has_crashed(next_run) is None
        await report_exit(client, next_run, crashed=True)
        assert await deaths.has_crashed(next_run) is True
        assert await deaths.has_crashed(run) is False
        assert await EtcdExitReports(client, wait_s=0.05).has_crashed("decode/decode-0/run-0") is None
        assert await NoExitReports().has_crashed(run) is None
    finally:
        await client.close()


class ClientWithOneFailingSwap(EtcdClient):
    """A client whose first swap fails before or after etcd applies it, as when a member stops."""

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
async def test_an_exit_report_is_written_despite_one_failed_swap(etcd: EtcdProcess, made_first: bool) -> None:
    run = run_name(Role.DECODE, "decode-0", "run-1")
    client = ClientWithOneFailingSwap([etcd.endpoint], timeout_s=60.0)
    client.made_first = made_first
    try:
        await report_exit(client, run, crashed=True)
        assert client.lost == 1
        assert await EtcdExitReports(client, wait_s=30.0).has_crashed(run) is True
    finally:
        await client.close()


async def test_routers_report_what_ran_on_a_crashed_worker_to_each_other(
    etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_reports, "ATTEMPTS_REPORT_WAIT_S", 0.0)
    crashed, other_run = (run_name(Role.DECODE, "decode-0", name) for name in ("run-1", "run-10"))
    client = EtcdClient([etcd.endpoint])
    routers = [EtcdExitReports(client, wait_s=30.0) for _ in range(3)]
    try:
        for router, ran in zip(routers, [(1, 1), (5, 0), (2, 2)], strict=True):
            await router.report_attempts(crashed, CrashedAttempts(*ran))
        assert await routers[0].attempts_elsewhere(crashed) == (7, 2)
        assert await routers[1].attempts_elsewhere(crashed) == (3, 3)
        assert await routers[0].attempts_elsewhere(other_run) == (0, 0)
        await client.put(f"{exit_reports.ATTEMPTS_PREFIX}{crashed}/x", b"{}")
        assert await routers[0].attempts_elsewhere(crashed) == (0, 0)  # it reads no such report
    finally:
        await client.close()
    away = EtcdExitReports(EtcdClient(["127.0.0.1:1"]), wait_s=0.1)
    await away.report_attempts(crashed, CrashedAttempts(1, 0))
    assert await away.attempts_elsewhere(crashed) == (0, 0)

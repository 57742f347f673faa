"""Exit reports: how they reach etcd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from libs.common.cluster import exit_reports
from libs.common.cluster.exit_reports import (
    CrashedAttempts,
    EtcdExitReports,
    NoExitReports,
    WorkerExit,
    report_exit,
    run_name,
)
from libs.common.cluster.worker_record import Role
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.messages import EtcdRefused, EtcdUnavailable, Swap, SwapOutcome
from tests.support.processes.etcd_process import EtcdProcess


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path) as process:
        yield process


async def settled(client: EtcdClient, run: str) -> WorkerExit:
    """What etcd knows of an end that has no report. A slow machine may need longer for the answer."""
    for wait_s in (0.5, 2.0, 8.0, 32.0):
        found = await EtcdExitReports(client, wait_s=wait_s).exit_of(run)
        if found is not WorkerExit.UNKNOWN:
            break
    return found


async def test_an_exit_report_belongs_to_one_incarnation(etcd: EtcdProcess) -> None:
    run, next_run = (run_name(Role.DECODE, "decode-0", name) for name in ("run-1", "run-2"))
    client = EtcdClient([etcd.endpoint])
    deaths = EtcdExitReports(client, wait_s=30.0)
    try:
        await report_exit(client, run, crashed=False)
        assert await deaths.exit_of(run) is WorkerExit.KILLED
        await report_exit(client, run, crashed=True)  # a process ends only once
        assert await deaths.exit_of(run) is WorkerExit.KILLED
        assert await settled(client, next_run) is WorkerExit.UNREPORTED
        await report_exit(client, next_run, crashed=True)
        assert await deaths.exit_of(next_run) is WorkerExit.CRASHED
        assert await deaths.exit_of(run) is WorkerExit.KILLED
        assert await NoExitReports().exit_of(run) is WorkerExit.UNREPORTED
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
        assert await EtcdExitReports(client, wait_s=30.0).exit_of(run) is WorkerExit.CRASHED
    finally:
        await client.close()


class FullEtcd:
    """Raises etcd's alarm of a full database: it refuses changes, and answers reads."""

    _NO_SPACE = b"\x18\x01"

    def __init__(self, etcd: EtcdProcess) -> None:
        self._channel = grpc.aio.insecure_channel(etcd.endpoint)
        self._alarm: Any = self._channel.unary_unary("/etcdserverpb.Maintenance/Alarm")

    async def begin(self) -> None:
        await self._alarm(b"\x08\x01" + self._NO_SPACE)

    async def end(self) -> None:
        await self._alarm(b"\x08\x02" + self._NO_SPACE)

    async def close(self) -> None:
        await self._channel.close()


async def test_an_exit_report_is_written_once_etcd_takes_changes_again(etcd: EtcdProcess) -> None:
    run = run_name(Role.DECODE, "decode-0", "run-1")
    client, full = EtcdClient([etcd.endpoint]), FullEtcd(etcd)
    try:
        await full.begin()
        with pytest.raises(EtcdRefused):
            await client.put("other", b"")
        writing = asyncio.create_task(report_exit(client, run, crashed=True))
        assert await settled(client, run) is WorkerExit.UNREPORTED
        assert not writing.done()
        await full.end()
        assert await EtcdExitReports(client, wait_s=30.0).exit_of(run) is WorkerExit.CRASHED
        await writing
    finally:
        await full.close()
        await client.close()


async def test_an_exit_report_that_etcd_refuses_to_the_end_is_given_up(
    etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exit_reports, "EXIT_REPORT_WRITE_S", 0.3)
    client, full = EtcdClient([etcd.endpoint]), FullEtcd(etcd)
    try:
        await full.begin()
        async with asyncio.timeout(60):
            await report_exit(client, "decode/decode-0/run-1", crashed=True)
        assert "the exit report of decode/decode-0/run-1 was not written" in caplog.text
    finally:
        await full.close()
        await client.close()


@pytest.mark.parametrize("way", ["killed", "stopped"])
async def test_an_end_during_an_outage_of_etcd_is_unknown_until_its_report_is_written(
    etcd: EtcdProcess, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor goes on trying, and the router knows that etcd was unavailable a moment ago."""
    monkeypatch.setattr(exit_reports, "_LATE_S", 1000.0)  # a moment on any machine
    run = run_name(Role.DECODE, "decode-0", "run-1")
    of_supervisor, of_router = EtcdClient([etcd.endpoint], timeout_s=2.0), EtcdClient([etcd.endpoint])
    soon, late = EtcdExitReports(of_router, wait_s=0.3), EtcdExitReports(of_router, wait_s=60.0)
    try:
        assert await settled(of_router, run) is WorkerExit.UNREPORTED
        etcd.kill() if way == "killed" else etcd.suspend()
        writing = asyncio.create_task(report_exit(of_supervisor, run, crashed=False))
        assert await soon.exit_of(run) is WorkerExit.UNKNOWN
        await asyncio.sleep(1.5)  # longer than a router waits
        etcd.start() if way == "killed" else etcd.resume()
        assert await late.exit_of(run) is WorkerExit.KILLED
        await writing
        other = run_name(Role.DECODE, "decode-0", "run-2")
        assert await soon.exit_of(other) is WorkerExit.UNKNOWN, "its report may be on its way"
    finally:
        await of_supervisor.close()
        await of_router.close()


async def test_an_end_after_a_standstill_of_the_router_is_no_outage_of_etcd(
    etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_reports, "_LATE_S", 1000.0)  # longer than a slow machine needs for the answer
    client = EtcdClient([etcd.endpoint], timeout_s=60.0)
    try:
        await client.get("any")
        client._timeout_s = 1.0
        unsent = [asyncio.create_task(client.get("any")), asyncio.create_task(client.put("other", b""))]
        await asyncio.sleep(0)  # both calls have begun, and are sent by the next iteration
        time.sleep(1.5)  # noqa: ASYNC251 - longer than their time-outs
        errors = await asyncio.gather(*unsent, return_exceptions=True)
        assert any(isinstance(error, EtcdUnavailable) for error in errors), "no call has timed out"
        client._timeout_s = 60.0
        assert await settled(client, run_name(Role.DECODE, "decode-0", "run-1")) is WorkerExit.UNREPORTED
    finally:
        await client.close()


@pytest.mark.parametrize("n_answers", [0, 1, 10**9])
async def test_an_end_is_unknown_where_etcd_falls_silent_after_an_answer(n_answers: int) -> None:
    """As where the host of etcd, of the supervisor and of the worker loses its power."""
    left = n_answers

    class Silenced:
        failed_s = float("-inf")  # no call has timed out yet

        async def get(self, key: str) -> None:
            nonlocal left
            if not left:
                await asyncio.Event().wait()
            left -= 1

    run, client = "decode/decode-0/run-1", cast(EtcdClient, Silenced())
    if n_answers > 1:
        assert await settled(client, run) is WorkerExit.UNREPORTED
    else:
        assert await EtcdExitReports(client, wait_s=0.8).exit_of(run) is WorkerExit.UNKNOWN


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
        for malformed in (b"{}", b"[Infinity, 0]", b"[" * 10_000):
            await client.put(f"{exit_reports.ATTEMPTS_PREFIX}{crashed}/x", malformed)
            assert await routers[0].attempts_elsewhere(crashed) == (0, 0)  # it reads no such report
            await client.put(exit_reports.EXITS_PREFIX + other_run, malformed)
            assert await routers[0].exit_of(other_run) is WorkerExit.UNREPORTED
    finally:
        await client.close()
    away = EtcdExitReports(EtcdClient(["127.0.0.1:1"]), wait_s=0.1)
    await away.report_attempts(crashed, CrashedAttempts(1, 0))
    assert await away.attempts_elsewhere(crashed) == (0, 0)

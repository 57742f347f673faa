"""How a process ended tells whether it broke."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.common.deaths import EtcdDeaths, NoDeaths, broke_by_itself, count_oom_kills, report_death, run_name
from libs.common.etcd.client import EtcdClient
from libs.common.worker_record import Role, Worker, encode_worker
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
    ],
)
def test_who_broke(code: int, oom_kills: int, broke: bool) -> None:
    assert broke_by_itself(code, oom_kills=oom_kills) is broke
    assert count_oom_kills() >= 0


async def test_a_report_reaches_who_asks_and_is_of_that_run_alone(etcd: EtcdProcess) -> None:
    worker = Worker(Role.DECODE, "decode-0", "127.0.0.1:1", "run-1")
    client = EtcdClient([etcd.endpoint])
    deaths = EtcdDeaths(client, wait_s=30.0)
    try:
        await report_death(client, worker.key, broke=True)  # it never announced itself: of whom?
        await client.put(worker.key, encode_worker(worker))
        await report_death(client, worker.key, broke=False)
        assert await deaths.broke(run_name(worker)) is False
        await report_death(client, worker.key, broke=True)  # the next run, which had no record yet
        assert await deaths.broke(run_name(worker)) is False
        assert await EtcdDeaths(client, wait_s=0.05).broke("decode/decode-0/run-0") is None
        assert await NoDeaths().broke(run_name(worker)) is None
    finally:
        await client.close()

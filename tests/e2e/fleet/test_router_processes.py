"""Routers with several processes on one port: they drain and restart under load; `slipstream status` lists
each process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.faults.fault_load import Answer, FaultRequest, mixed_requests
from libs.common.cluster.worker_record import Role
from slipstream.errors import Unavailable
from slipstream.operator_access import operator_dial
from supervisor.commands.drain import drain_process, restart_processes
from supervisor.commands.status import show_status
from tests.e2e.fleet.test_drain import WAIT_S, Aside, run_dir, under_load
from tests.support.clusters.disturbance import assert_undisturbed, undisturbed
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir

# A step of fourteen streams takes 56 ms: streams run all the time that a router restarts, and leave it the
# cores.
DECODE_PACE_S = 0.004


@pytest.fixture(scope="module")
def several(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Two routers of two processes each."""
    with lasting_dir(request, "several") as run_dir:
        config = fake_engine_config(
            run_dir,
            pace_s=0.0003,
            decode_pace_s=DECODE_PACE_S,
            routers=2,
            prefill=1,
            decode=1,
            kvstores=0,
            drafters=0,
            extra_arguments={Role.ROUTER: ["--processes", "2"]},
        )
        with LocalCluster(config) as running:
            yield running


@pytest.fixture(scope="module")
def requests() -> list[FaultRequest]:
    return mixed_requests(14, tokens=32)


@pytest.fixture(scope="module")
def answers(several: LocalCluster, requests: list[FaultRequest]) -> list[Answer]:
    return undisturbed(several, requests)


def status_of_routers(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """The routers in the output of `slipstream status`, by instance."""
    capsys.readouterr()
    with contextlib.suppress(Unavailable):  # raised after the output, for a process that is away
        asyncio.run(show_status(run_dir(cluster), as_json=True, dial=operator_dial(run_dir(cluster))))
    workers = json.loads(capsys.readouterr().out)["workers"]
    return {worker["instance"]: worker for worker in workers if worker["role"] == "router"}


def ready_routers(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> set[str]:
    return {
        name for name, worker in status_of_routers(cluster, capsys).items() if worker["status"] is not None
    }


def test_status_lists_every_process(several: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"router-0", "router-0.1", "router-1", "router-1.1"}
    # A router is ready with its first process; the other one follows.
    until(lambda: ready_routers(several, capsys) == names, timeout_s=WAIT_S, what="all four answer")
    routers = status_of_routers(several, capsys)
    assert {worker["status"]["instance"] for worker in routers.values() if worker["status"]} <= names
    assert routers["router-0"]["rss_bytes"] > 3 * 10_000_000, "of the process and two children"


def test_a_router_drains_and_restarts_under_load(
    several: LocalCluster,
    requests: list[FaultRequest],
    answers: list[Answer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory: Path = run_dir(several)
    drain = Aside(lambda: drain_process(directory, "router-0", timeout_s=WAIT_S))
    assert_undisturbed(several, requests, answers, disturb=drain.start, after_tokens=100)
    drain.join()
    others = {"router-1", "router-1.1"}
    until(lambda: ready_routers(several, capsys) == others, timeout_s=WAIT_S, what="the other two answer")
    routers = status_of_routers(several, capsys)
    assert routers["router-0"]["state"] == "drained"
    assert "router-0.1" not in routers
    restart = Aside(lambda: restart_processes(directory, "router-0", rolling=False, timeout_s=WAIT_S))
    under_load(several, requests, answers, restart)
    until(lambda: len(ready_routers(several, capsys)) == 4, timeout_s=WAIT_S, what="all are back")
    several.assert_idle()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_rolling_restart_of_all_routers(
    several: LocalCluster,
    requests: list[FaultRequest],
    answers: list[Answer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rolling() -> None:
        for _ in range(3):
            for name in ("router-0", "router-1"):
                restart_processes(run_dir(several), name, rolling=False, timeout_s=WAIT_S)

    under_load(several, requests, answers, Aside(rolling))
    until(lambda: len(ready_routers(several, capsys)) == 4, timeout_s=WAIT_S, what="all are back")
    several.assert_idle()

"""A router with several processes on one port: they drain and restart under load; `slipstream status` and
`scrape.json` list each process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.faults.fault_load import Answer, FaultRequest, mixed_requests
from libs.common.cluster.worker_record import Role
from slipstream.errors import Unavailable
from slipstream.operator_access import operator_dial
from supervisor.commands.drain import drain_process, restart_process
from supervisor.commands.status import show_status
from supervisor.run_directory import SCRAPE_FILE
from tests.e2e.fleet.test_drain import WAIT_S, Aside, run_dir, under_load
from tests.support.clusters.disturbance import assert_undisturbed, run_load, undisturbed
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir

# A step of seven streams takes 56 ms: streams run all the time that a router restarts, and leave it the
# cores.
DECODE_PACE_S = 0.008
ALL = {"router-0", "router-0.1", "router-1"}


@pytest.fixture(scope="module")
def several(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """A router of two processes, and one that streams go to meanwhile."""
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
            instance_arguments={"router-0": ("--processes", "2")},
            # The port is the first process's alone: each other one advertises the port that it has.
            extra_arguments={Role.ROUTER: ["--admin-http-advertise", "localhost:9"]},
        )
        with LocalCluster(config) as running:
            yield running


@pytest.fixture(scope="module")
def requests() -> list[FaultRequest]:
    return mixed_requests(7, tokens=24)


@pytest.fixture(scope="module")
def answers(several: LocalCluster, requests: list[FaultRequest]) -> list[Answer]:
    return undisturbed(several, requests)


def status_of_routers(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """The routers in the output of `slipstream status`, by instance."""
    capsys.readouterr()
    with contextlib.suppress(Unavailable):  # raised after the output, for a process that is unavailable
        asyncio.run(show_status(run_dir(cluster), as_json=True, dial=operator_dial(run_dir(cluster))))
    workers = json.loads(capsys.readouterr().out)["workers"]
    return {worker["instance"]: worker for worker in workers if worker["role"] == "router"}


def ready_routers(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> set[str]:
    return {
        name for name, worker in status_of_routers(cluster, capsys).items() if worker["status"] is not None
    }


def scraped_routers(cluster: LocalCluster) -> dict[str, str]:
    """The admin port of each router process that Prometheus scrapes, by name."""
    targets = json.loads((run_dir(cluster) / SCRAPE_FILE).read_text())
    return {
        target["labels"]["process"]: target["targets"][0]
        for target in targets
        if target["labels"]["component"] == "router"
    }


def requests_by_scrapes(cluster: LocalCluster) -> list[float]:
    """The requests that each scraped process has accepted."""
    found = []
    for port in scraped_routers(cluster).values():
        with urllib.request.urlopen(f"http://{port}/metrics", timeout=60) as answer:
            page = answer.read().decode()
        found += [float(value) for value in re.findall(r"(?m)^slipstream_requests_total (\S+)", page)]
    return found


def test_status_lists_every_process(several: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    # A router is ready with its first process; the other one follows.
    until(lambda: ready_routers(several, capsys) == ALL, timeout_s=WAIT_S, what="all three answer")
    routers = status_of_routers(several, capsys)
    assert {worker["status"]["instance"] for worker in routers.values() if worker["status"]} <= ALL
    assert routers["router-0"]["rss_bytes"] > 3 * 10_000_000, "of the process and two children"


def test_prometheus_counts_the_requests_of_every_process(
    several: LocalCluster, requests: list[FaultRequest]
) -> None:
    until(lambda: set(scraped_routers(several)) == ALL, timeout_s=WAIT_S, what="all three are targets")
    before = requests_by_scrapes(several)
    run_load(several, requests)
    after = requests_by_scrapes(several)
    ports = scraped_routers(several)
    assert len(after) == len(set(ports.values())) == len(ALL)
    hosts = {name: port.rpartition(":")[0] for name, port in ports.items()}
    assert hosts == dict.fromkeys(ALL, "127.0.0.1"), "a name that is advertised is for others"
    assert sum(after) - sum(before) == len(requests)


def test_a_router_drains_and_restarts_under_load(
    several: LocalCluster,
    requests: list[FaultRequest],
    answers: list[Answer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory: Path = run_dir(several)
    drain = Aside(lambda: drain_process(directory, "router-0", timeout_s=WAIT_S))
    assert_undisturbed(several, requests, answers, disturb=drain.start, after_tokens=50)
    drain.join()
    others = {"router-1"}
    until(lambda: ready_routers(several, capsys) == others, timeout_s=WAIT_S, what="the other one answers")
    routers = status_of_routers(several, capsys)
    assert routers["router-0"]["state"] == "drained"
    assert "router-0.1" not in routers
    assert set(scraped_routers(several)) == others
    restart = Aside(lambda: restart_process(directory, "router-0", timeout_s=WAIT_S))
    under_load(several, requests, answers, restart)
    until(lambda: ready_routers(several, capsys) == ALL, timeout_s=WAIT_S, what="all are back")
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
                restart_process(run_dir(several), name, timeout_s=WAIT_S)

    under_load(several, requests, answers, Aside(rolling))
    until(lambda: ready_routers(several, capsys) == ALL, timeout_s=WAIT_S, what="all are back")
    several.assert_idle()

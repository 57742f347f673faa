"""Real faults reach a webhook as the right alert, by a real Prometheus and Alertmanager, and end there.

The rules are the shipped ones with a shorter `for`.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.faults.faulty_disk import FaultyDisk
from libs.common.cluster.worker_record import Role
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir
from tests.support.processes.prometheus_process import Watched, needs

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
STORE, ROUTER = "kvstore-0", "router-1"


@pytest.fixture(scope="module")
def disk(request: pytest.FixtureRequest) -> Iterator[FaultyDisk]:
    needs("prometheus", "prometheus-alertmanager")
    with (
        lasting_dir(request, "shim") as shim,
        lasting_dir(request, "alerts") as run_dir,
        FaultyDisk(shim, run_dir / "data" / STORE) as disk,
    ):
        yield disk


@pytest.fixture(scope="module")
def watched_cluster(disk: FaultyDisk) -> Iterator[LocalCluster]:
    config = fake_engine_config(
        disk.directory.parent.parent,
        routers=2,
        drafters=0,  # fake drafts do not pay, which is an alert
        extra_arguments={Role.KVSTORE: ["--dram-bytes", str(1 << 20), "--disk-bytes", str(16 << 20)]},
        extra_environment={Role.KVSTORE: disk.environment},
    )
    with LocalCluster(config) as cluster:
        yield cluster


@pytest.fixture
def watched(request: pytest.FixtureRequest, watched_cluster: LocalCluster) -> Iterator[Watched]:
    with lasting_dir(request, "watch") as directory, Watched(directory, watched_cluster.run_dir) as watched:
        n_processes = len(watched_cluster.workers)
        until(
            lambda: len(watched.query("up == 1")) == n_processes,
            what=lambda: f"{n_processes} processes are read; {watched.query('up')}",
        )
        assert not watched.told()
        yield watched


def chat(cluster: LocalCluster, number: int) -> None:
    """One request whose blocks are new."""
    text = f"Question {number}: " + " ".join(str(number * n) for n in range(300))
    cluster.client.chat([{"role": "user", "content": text}], max_tokens=4)


def test_a_disk_that_fails(watched: Watched, watched_cluster: LocalCluster, disk: FaultyDisk) -> None:
    requests = iter(range(1_000_000))
    disk.fail(errno.EROFS, "open", "write", "sync")

    def fires() -> bool:
        chat(watched_cluster, next(requests))
        return watched.firing("SlipstreamDiskUnavailable", process=STORE)

    until(fires, what=lambda: f"the alert of the disk; {watched.told()}")
    assert watched.names() == {"SlipstreamDiskUnavailable"}
    disk.heal()

    def ends() -> bool:
        chat(watched_cluster, next(requests))
        return watched.resolved("SlipstreamDiskUnavailable", process=STORE)

    until(ends, what="the end of the alert of the disk")


def test_a_router_that_hangs_and_then_dies(watched: Watched, watched_cluster: LocalCluster) -> None:
    with stopped(watched_cluster, ROUTER):
        until(
            lambda: watched.firing("SlipstreamProcessDown", process=ROUTER),
            what=lambda: f"the alert of the router; {watched.told()}",
        )
        chat(watched_cluster, 0)  # the other router works
    until(lambda: watched.resolved("SlipstreamProcessDown", process=ROUTER), what="its end")
    for _ in range(3):
        before = started_s(watched)
        assert before
        pid = watched_cluster.pid(ROUTER)
        os.kill(pid, signal.SIGKILL)
        watched_cluster.until_running(ROUTER, but=pid)
        until(lambda was=before: started_s(watched) not in (was, 0.0), what="a new start is read")  # type: ignore[misc]
    until(
        lambda: watched.firing("SlipstreamCrashLoop", process=ROUTER),
        what=lambda: f"the alert of the crashes; {watched.told()}",
    )
    assert watched.names() == {"SlipstreamProcessDown", "SlipstreamCrashLoop"}
    assert {alert["labels"]["process"] for alert in watched.told()} == {ROUTER}


def started_s(watched: Watched) -> float:
    """When the router started, as Prometheus last read it; 0 while it does not answer."""
    found = watched.query(f'process_start_time_seconds{{process="{ROUTER}"}}')
    return found[0][1] if found else 0.0


def test_an_etcd_that_hangs(watched: Watched, watched_cluster: LocalCluster) -> None:
    with stopped(watched_cluster, "etcd"):
        until(
            lambda: watched.firing("SlipstreamEtcdUnavailable"),
            what=lambda: f"the alert of etcd; {watched.told()}",
        )
        chat(watched_cluster, 0)  # requests go on
    until(lambda: watched.resolved("SlipstreamEtcdUnavailable"), what="its end")
    assert watched.names() == {"SlipstreamEtcdUnavailable"}


@contextmanager
def stopped(cluster: LocalCluster, instance: str) -> Iterator[None]:
    """The process answers nothing meanwhile."""
    pid = cluster.pid(instance)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)

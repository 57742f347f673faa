"""etcd is killed, and stopped, under load: no request fails, no process exits, and all rejoin soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from bench.faults.fault_load import Answer, FaultRequest, mixed_requests
from libs.common.cluster.worker_record import WORKERS_PREFIX
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.messages import EtcdUnavailable
from tests.support.clusters.disturbance import assert_undisturbed, undisturbed
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir

How = Callable[[LocalCluster], AbstractContextManager[None]]
# Longer than the lease of a worker, so that all records have expired when etcd is back.
OUTAGE_S = 12.0
SOAK_OUTAGE_S = 60.0
# Longer than a lease, which a restarted etcd extends by its whole time: missing workers have expired by then.
SETTLED_S = 15.0
# A step of four streams takes 80 ms: streams run all the time that etcd is unavailable, and the processes are
# idle in between.
DECODE_PACE_S = 0.02


@pytest.fixture(scope="module")
def paced(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """As `fakes`, with slow decode engines."""
    with lasting_dir(request, "paced") as run_dir:
        config = fake_engine_config(run_dir, pace_s=0.0003, decode_pace_s=DECODE_PACE_S, routers=2)
        with LocalCluster(config) as running:
            yield running
            running.assert_idle()


@pytest.fixture(scope="module")
def few() -> list[FaultRequest]:
    return mixed_requests(8, tokens=32)


@pytest.fixture(scope="module")
def few_expected(paced: LocalCluster, few: list[FaultRequest]) -> list[Answer]:
    return undisturbed(paced, few)


@contextmanager
def killed(fakes: LocalCluster) -> Iterator[None]:
    fakes.call(fakes.supervisor.hold("etcd"))
    try:
        yield
    finally:
        fakes.call(fakes.supervisor.release("etcd"))


@contextmanager
def stopped(fakes: LocalCluster) -> Iterator[None]:
    pid = fakes.pid("etcd")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def announced(fakes: LocalCluster) -> set[str]:
    """The names of the workers in etcd; empty while etcd does not answer."""

    async def ask() -> set[str]:
        client = EtcdClient([fakes.supervisor.record().etcd], timeout_s=10.0)
        try:
            entries = (await client.get_prefix(WORKERS_PREFIX)).entries
        except EtcdUnavailable:
            return set()
        finally:
            await client.close()
        return {key.rpartition("/")[2] for key, entry in entries.items() if b'"leaving"' not in entry.value}

    found: set[str] = fakes.call(ask())
    return found


def missing_s(fakes: LocalCluster, *, settled_s: float) -> float:
    """Seconds until all workers are announced, and stay so for `settled_s`."""
    began_s = last_s = time.monotonic()

    def all_stay() -> bool:
        nonlocal last_s
        if announced(fakes) != set(fakes.workers):
            last_s = time.monotonic()
            return False
        return time.monotonic() >= began_s + settled_s

    until(all_stay, what="all announced again")
    return last_s - began_s


def etcd_unavailable(
    fakes: LocalCluster,
    load: list[FaultRequest],
    expected: list[Answer],
    how: How,
    *,
    outage_s: float,
    settled_s: float = 0.0,
) -> None:
    """Make etcd unavailable under load. `settled_s`: the time after which a missing worker would have
    expired."""
    pids = {instance: fakes.pid(instance) for instance in fakes.workers}
    with how(fakes):
        until_s = time.monotonic() + outage_s
        while time.monotonic() < until_s:
            assert_undisturbed(fakes, load, expected, disturb=lambda: None, after_tokens=1)
    print(f"a worker was missing until {missing_s(fakes, settled_s=settled_s):.2f} s after etcd was back")
    assert_undisturbed(fakes, load, expected, disturb=lambda: None, after_tokens=1)
    assert {instance: fakes.pid(instance) for instance in fakes.workers} == pids


@pytest.mark.parametrize("how", [killed, stopped])
def test_etcd_unavailable_under_load(
    paced: LocalCluster,
    few: list[FaultRequest],
    few_expected: list[Answer],
    how: How,
) -> None:
    etcd_unavailable(paced, few, few_expected, how, outage_s=OUTAGE_S)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [killed, stopped])
def test_etcd_unavailable_for_a_minute(
    fakes: LocalCluster,
    fifty: list[FaultRequest],
    fifty_expected: list[Answer],
    how: How,
) -> None:
    etcd_unavailable(fakes, fifty, fifty_expected, how, outage_s=SOAK_OUTAGE_S, settled_s=SETTLED_S)

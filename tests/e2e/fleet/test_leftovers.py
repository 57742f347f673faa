"""Kills, stops and cancels leak nothing: no task and no descriptor in a surviving process, and no key in etcd
but those of running workers and hints with a lease."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest

from bench.faults.fault_load import Answer, FaultRequest, mixed_requests
from libs.common.cluster.exit_reports import ATTEMPTS_PREFIX, EXITS_PREFIX
from libs.common.cluster.placement_record import SESSIONS_PREFIX
from libs.common.cluster.worker_record import WORKERS_PREFIX
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.messages import KeyValue
from libs.common.transport.socket_read import READS_PER_PEER
from slipstream.async_client import AsyncClient
from tests.support.clusters.disturbance import DECODERS, HELD_FROM, assert_undisturbed, disturbed_in_flight
from tests.support.clusters.local_cluster import LocalCluster, until

# Tolerance for connections of the test's client, and for a timer between two reports.
TASK_SLACK = 6
# A worker keeps as many KV connections to each of at most four peers as were needed at once.
DESCRIPTOR_SLACK = TASK_SLACK + 4 * READS_PER_PEER
SOAK_ROUNDS = 10
VICTIMS = ("decode-0", "prefill-0", "kvstore-0", "drafter-0", "decode-1")
TASKS = "slipstream_event_loop_tasks"


@pytest.fixture(scope="module")
def load() -> list[FaultRequest]:
    return mixed_requests(14, tokens=24)


def in_use(cluster: LocalCluster, instance: str) -> tuple[int, int]:
    """Descriptors and tasks of a process."""
    descriptors = len(os.listdir(f"/proc/{cluster.pid(instance)}/fd"))
    return descriptors, int(cluster.status(instance).counters[TASKS])


def least(cluster: LocalCluster) -> dict[str, tuple[int, int]]:
    """The descriptors and tasks of each process when idle."""
    cluster.assert_idle()
    return {name: in_use(cluster, name) for name in cluster.workers}


def keys(cluster: LocalCluster) -> Mapping[str, KeyValue]:
    async def ask() -> Mapping[str, KeyValue]:
        client = EtcdClient([cluster.supervisor.record().etcd], timeout_s=60.0)
        try:
            return (await client.get_prefix("/slipstream/")).entries
        finally:
            await client.close()

    found: Mapping[str, KeyValue] = cluster.call(ask())
    return found


def assert_no_stray_key(cluster: LocalCluster) -> None:
    def workers(entries: Mapping[str, KeyValue]) -> set[str]:
        return {key.rpartition("/")[2] for key in entries if key.startswith(WORKERS_PREFIX)}

    until(lambda: workers(keys(cluster)) == set(cluster.workers), what="the workers that are there, no other")
    for key, entry in keys(cluster).items():
        assert key.startswith((WORKERS_PREFIX, SESSIONS_PREFIX, EXITS_PREFIX, ATTEMPTS_PREFIX)), key
        assert entry.lease_id, f"{key} has no lease"


def leave_early(cluster: LocalCluster, load: list[FaultRequest], expected: list[Answer]) -> None:
    """Disconnect clients in the middle of their answers; the decode engines are held until then."""
    lasting = sum(answer.completion_tokens > HELD_FROM for answer in expected)

    def in_flight() -> bool:
        return sum(map(cluster.sequences, DECODERS)) >= lasting

    async def read(client: AsyncClient, request: FaultRequest) -> None:
        async for _ in client.stream_chat(request.messages, **request.arguments):
            pass

    async def all_of_them() -> int:
        async with AsyncClient(cluster.routers) as client:
            readers = [asyncio.create_task(read(client, request)) for request in load]
            await asyncio.to_thread(until, in_flight, what=f"{lasting} streams at the decode workers")
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)
        return sum(reader.cancelled() for reader in readers)

    cluster.assert_idle()  # the next load reuses the ids
    with cluster.gate.held(*DECODERS, from_token=HELD_FROM):
        assert cluster.call(all_of_them()) >= lasting
    cluster.assert_idle()


def disturb(
    cluster: LocalCluster, load: list[FaultRequest], expected: list[Answer], victims: Sequence[str]
) -> None:
    for victim in victims:
        pid = cluster.pid(victim)
        disturbed_in_flight(cluster, load, expected, disturb=partial(os.kill, pid, signal.SIGKILL))
        cluster.until_running(victim, but=pid)
    stopped = cluster.pid("prefill-1")
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert_undisturbed(cluster, load, expected, disturb=lambda: None, after_tokens=1)
    finally:
        os.kill(stopped, signal.SIGCONT)
    leave_early(cluster, load, expected)


def assert_nothing_left(
    cluster: LocalCluster,
    load: list[FaultRequest],
    expected: list[Answer],
    *,
    victims: Sequence[str],
    rounds: int = 1,
) -> None:
    again: Callable[[], object] = partial(
        assert_undisturbed, cluster, load, expected, disturb=lambda: None, after_tokens=1
    )
    again()
    pids = {name: cluster.pid(name) for name in cluster.workers if name not in victims}
    before = least(cluster)
    for _ in range(rounds):
        disturb(cluster, load, expected, victims)
    again()

    def more() -> dict[str, str]:
        found = {}
        for name in pids:
            then, now = before[name], in_use(cluster, name)
            if now[0] > then[0] + DESCRIPTOR_SLACK or now[1] > then[1] + TASK_SLACK:
                found[name] = f"descriptors and tasks {then} before, {now} now"
        return found

    until(lambda: not more(), what=lambda: str(more()))
    assert {name: cluster.pid(name) for name in pids} == pids
    assert_no_stray_key(cluster)


def test_after_a_kill_a_stop_and_cancels_nothing_is_left(
    fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer]
) -> None:
    assert_nothing_left(fakes, load, expected, victims=("decode-0",))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_after_many_kills_nothing_is_left(
    fakes: LocalCluster, fifty: list[FaultRequest], fifty_expected: list[Answer]
) -> None:
    """A leak of one descriptor or task per kill exceeds the tolerance."""
    assert_nothing_left(fakes, fifty[:21], fifty_expected[:21], victims=VICTIMS, rounds=SOAK_ROUNDS)

"""Fifty streams of all kinds, and a worker that is killed or stopped under them: none fails, none differs.

Every process is real; the workers run the fake engine, which proves each byte of KV it is given.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest

from bench.fault_load import FaultRequest, mixed_requests
from tests.support.disturbance import assert_undisturbed, undisturbed
from tests.support.fake_engines import fake_engine_config
from tests.support.local_cluster import LocalCluster, until

STREAMS = 50
TOKENS = 64
SOAK_ROUNDS = 20
KILLED = ("decode-0", "prefill-0", "kvstore-0", "drafter-0", "decode-1", "prefill-1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(fake_engine_config(tmp_path_factory.mktemp("fakes"), pace_s=0.0003)) as running:
        yield running


@pytest.fixture(scope="module")
def load() -> list[FaultRequest]:
    return mixed_requests(STREAMS, tokens=TOKENS)


@pytest.fixture(scope="module")
def expected(cluster: LocalCluster, load: list[FaultRequest]) -> list[object]:
    return undisturbed(cluster, load)


def kill_round(
    cluster: LocalCluster,
    load: list[FaultRequest],
    expected: list[object],
    victim: str,
    *,
    after_tokens: int,
) -> list[int]:
    """Kill it under the load; returns the attempts each request took."""

    def kill() -> None:
        os.kill(cluster.pid(victim), signal.SIGKILL)

    restarts = cluster.supervisor.record().find(victim).restarts
    runs = assert_undisturbed(cluster, load, expected, disturb=kill, after_tokens=after_tokens)

    def back() -> bool:
        process = cluster.supervisor.record().find(victim)
        return process.restarts > restarts and process.state == "ready"

    until(back, timeout_s=60, what=f"{victim} is back")
    cluster.assert_idle()
    return [run.reply.trail.attempts for run in runs if run.reply.trail is not None]


@pytest.mark.parametrize(
    ("victim", "after_tokens"),
    [("decode-0", 1000), ("prefill-0", 1), ("kvstore-0", 300), ("drafter-0", 300)],
)
def test_a_killed_worker_fails_no_stream(
    cluster: LocalCluster,
    load: list[FaultRequest],
    expected: list[object],
    victim: str,
    after_tokens: int,
) -> None:
    attempts = kill_round(cluster, load, expected, victim, after_tokens=after_tokens)
    if victim.startswith("decode"):
        assert max(attempts) == 2
        assert attempts.count(2) > STREAMS // 5


def test_a_stopped_decode_worker_is_fenced(
    cluster: LocalCluster, load: list[FaultRequest], expected: list[object]
) -> None:
    """Its streams go on elsewhere; when it wakes up, it ends what it still ran and works again."""
    pid = cluster.pid("decode-0")
    try:
        runs = assert_undisturbed(
            cluster, load, expected, disturb=lambda: os.kill(pid, signal.SIGSTOP), after_tokens=1000
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    assert max(run.reply.trail.attempts for run in runs if run.reply.trail is not None) == 2
    cluster.assert_idle()
    assert cluster.pid("decode-0") == pid
    again = assert_undisturbed(cluster, load[:16], expected[:16], disturb=lambda: None, after_tokens=1)
    used = {run.reply.trail.decode_worker for run in again if run.reply.trail is not None}
    assert used == {"decode-0", "decode-1"}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_kills_of_every_tier_in_turn(
    cluster: LocalCluster, load: list[FaultRequest], expected: list[object]
) -> None:
    rng = random.Random(4)
    for number in range(SOAK_ROUNDS):
        victim = KILLED[number % len(KILLED)]
        kill_round(cluster, load, expected, victim, after_tokens=rng.randrange(1, STREAMS * TOKENS // 2))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_decode_worker_stopped_for_30_s(
    cluster: LocalCluster, load: list[FaultRequest], expected: list[object]
) -> None:
    """Longer than its lease in etcd and the ping of its connections."""
    pid = cluster.pid("decode-1")
    try:
        assert_undisturbed(
            cluster, load, expected, disturb=lambda: os.kill(pid, signal.SIGSTOP), after_tokens=1500
        )
        for _ in range(4):
            assert_undisturbed(cluster, load, expected, disturb=lambda: None, after_tokens=1)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not cluster.held(), timeout_s=30, what="ledgers empty")
    assert cluster.pid("decode-1") == pid

    def used_again() -> bool:
        runs = assert_undisturbed(cluster, load[:8], expected[:8], disturb=lambda: None, after_tokens=1)
        return any(run.reply.trail and run.reply.trail.decode_worker == "decode-1" for run in runs)

    until(used_again, timeout_s=30, what="decode-1 is used again")

"""Fifty streams of all kinds, and a worker that is killed or stopped under them: none fails, none differs.

Every process is real; the workers run the fake engine, which proves each byte of KV it is given.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from bench.fault_load import Answer, FaultRequest
from bench.ledgers import held
from tests.support.disturbance import assert_undisturbed
from tests.support.local_cluster import LocalCluster, until

SOAK_ROUNDS = 20
STOPPED_S = 30.0
KILLED = ("decode-0", "prefill-0", "kvstore-0", "drafter-0", "decode-1", "prefill-1")


def kill_round(
    fakes: LocalCluster,
    load: list[FaultRequest],
    expected: list[Answer],
    victim: str,
    *,
    after_tokens: int,
) -> list[int]:
    """Kill it under the load; returns the attempts each request took."""

    def kill() -> None:
        os.kill(fakes.pid(victim), signal.SIGKILL)

    restarts = fakes.supervisor.record().find(victim).restarts
    runs = assert_undisturbed(fakes, load, expected, disturb=kill, after_tokens=after_tokens)

    def back() -> bool:
        process = fakes.supervisor.record().find(victim)
        return process.restarts > restarts and process.state == "ready"

    until(back, timeout_s=60, what=f"{victim} is back")
    fakes.assert_idle()
    return [run.reply.trail.attempts for run in runs if run.reply.trail is not None]


@pytest.mark.parametrize(
    ("victim", "after_tokens"),
    [("decode-0", 1000), ("prefill-0", 1), ("kvstore-0", 300), ("drafter-0", 300)],
)
def test_a_killed_worker_fails_no_stream(
    fakes: LocalCluster,
    load: list[FaultRequest],
    expected: list[Answer],
    victim: str,
    after_tokens: int,
) -> None:
    attempts = kill_round(fakes, load, expected, victim, after_tokens=after_tokens)
    if victim.startswith("decode"):
        assert max(attempts) == 2
        assert attempts.count(2) > len(load) // 5


def test_a_stopped_decode_worker_is_fenced(
    fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer]
) -> None:
    """Its streams go on elsewhere; when it wakes up, it ends what it still ran and works again."""
    pid = fakes.pid("decode-0")
    try:
        runs = assert_undisturbed(
            fakes, load, expected, disturb=lambda: os.kill(pid, signal.SIGSTOP), after_tokens=1000
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    assert max(run.reply.trail.attempts for run in runs if run.reply.trail is not None) == 2
    fakes.assert_idle()
    assert fakes.pid("decode-0") == pid
    again = assert_undisturbed(fakes, load[:16], expected[:16], disturb=lambda: None, after_tokens=1)
    used = {run.reply.trail.decode_worker for run in again if run.reply.trail is not None}
    assert used == {"decode-0", "decode-1"}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_kills_of_every_tier_in_turn(
    fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer]
) -> None:
    rng = random.Random(4)
    for number in range(SOAK_ROUNDS):
        victim = KILLED[number % len(KILLED)]
        kill_round(fakes, load, expected, victim, after_tokens=rng.randrange(1, len(load) * 32))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_decode_worker_stopped_for_30_s(
    fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer]
) -> None:
    """Longer than its lease in etcd and the ping of its connections."""
    pid = fakes.pid("decode-1")
    try:
        assert_undisturbed(
            fakes, load, expected, disturb=lambda: os.kill(pid, signal.SIGSTOP), after_tokens=1500
        )
        until_s = time.monotonic() + STOPPED_S
        while time.monotonic() < until_s:
            # The ids are used again as soon as the routers have let go of them.
            until(lambda: not any(held(fakes.status(f"router-{n}")) for n in (0, 1)), what="routers idle")
            assert_undisturbed(fakes, load, expected, disturb=lambda: None, after_tokens=1)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not fakes.held(), timeout_s=30, what="ledgers empty")
    assert fakes.pid("decode-1") == pid

    def used_again() -> bool:
        runs = assert_undisturbed(fakes, load[:8], expected[:8], disturb=lambda: None, after_tokens=1)
        return any(run.reply.trail and run.reply.trail.decode_worker == "decode-1" for run in runs)

    until(used_again, timeout_s=30, what="decode-1 is used again")

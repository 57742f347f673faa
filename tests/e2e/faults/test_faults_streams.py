"""Streams of all kinds, and a worker that is killed or stopped: no stream fails, no answer differs.

Every process is real; the workers run the fake engine, which checks each byte of KV. `make soak` has fifty
streams.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial

import pytest

from bench.faults.fault_load import Answer, FaultRequest, longest_gap_s
from tests.support.clusters.disturbance import assert_undisturbed, attempts_of, disturbed_in_flight
from tests.support.clusters.local_cluster import LocalCluster, until

# Kills in the soak test, in tests of a few minutes.
SOAK_ROUNDS, PIECE_ROUNDS = 20, 5
STOPPED_S = 30.0
# Each round kills one worker of each tier.
TIERS = (("decode-0", "decode-1"), ("prefill-0", "prefill-1"), ("router-0",), ("kvstore-0",), ("drafter-0",))


def kill_round(
    fakes: LocalCluster,
    load: list[FaultRequest],
    expected: list[Answer],
    victim: str,
    *,
    after_tokens: int,
) -> str:
    """Kill a worker under the load at a random moment; returns a line about moved streams and gaps."""
    pid, signalled_s = fakes.pid(victim), 0.0

    def kill() -> None:
        nonlocal signalled_s
        signalled_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    runs = assert_undisturbed(fakes, load, expected, disturb=kill, after_tokens=after_tokens)
    fakes.until_running(victim, but=pid)
    fakes.assert_idle()
    moved = [run for run in runs if run.moved or (run.reply.stats and run.reply.stats.attempts > 1)]
    gaps_ms = [longest_gap_s(run, after_s=signalled_s) * 1e3 for run in moved]
    return f"{victim}: {len(moved)} of {len(runs)} moved, longest gap {max(gaps_ms, default=0.0):.0f} ms"


def met_in_flight(
    fakes: LocalCluster,
    load: list[FaultRequest],
    expected: list[Answer],
    victim: str,
    number: signal.Signals,
) -> float:
    """Signal a decode worker whose streams are in the middle of their tokens: all of them move.

    Returns the number of other streams that moved, without those that hedged a slow prefill."""
    theirs: list[int] = []

    def strike() -> None:
        theirs.append(fakes.sequences(victim))
        os.kill(fakes.pid(victim), number)

    hedged = fakes.counted("slipstream_hedges_total")
    runs = disturbed_in_flight(fakes, load, expected, disturb=strike)
    hedged = fakes.counted("slipstream_hedges_total") - hedged
    moved = [run for run in runs if run.reply.stats is not None and run.reply.stats.attempts > 1]
    stayed = [run for run in runs if run not in moved]
    assert theirs[0] > 0, "nothing ran there"
    assert theirs[0] <= len(moved)
    assert all(run.reply.stats is not None and run.reply.stats.decode_worker != victim for run in stayed)
    return len(moved) - theirs[0] - hedged


def test_a_killed_decode_worker_fails_no_stream(
    fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer]
) -> None:
    """Streams of other workers stay. A machine that stalls another worker moves its streams too, so the test
    tries several rounds."""

    def others_that_moved() -> float:
        pid = fakes.pid("decode-0")
        others = met_in_flight(fakes, load, expected, "decode-0", signal.SIGKILL)
        fakes.until_running("decode-0", but=pid)
        fakes.assert_idle()
        return others

    assert any(others_that_moved() <= 0 for _ in range(5))


def test_a_killed_prefill_worker_fails_no_stream(
    fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer]
) -> None:
    """The worker dies with prompts in flight; the other one computes them."""
    pid = fakes.pid("prefill-0")
    with fakes.gate.held("prefill-0") as gate:

        def kill() -> None:
            until(lambda: fakes.sequences("prefill-0"), what="a prompt at prefill-0")
            os.kill(pid, signal.SIGKILL)
            gate.open()

        runs = assert_undisturbed(fakes, load, expected, disturb=kill, after_tokens=0)
    assert max(attempts_of(runs)) > 1
    fakes.until_running("prefill-0", but=pid)
    fakes.assert_idle()


@pytest.mark.parametrize("victim", ["kvstore-0", "drafter-0"])
def test_a_killed_helper_fails_no_stream(
    fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer], victim: str
) -> None:
    pid = fakes.pid(victim)
    disturbed_in_flight(fakes, load, expected, disturb=partial(os.kill, pid, signal.SIGKILL))
    fakes.until_running(victim, but=pid)
    fakes.assert_idle()


def test_a_stopped_decode_worker_is_fenced(
    fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer]
) -> None:
    """Its streams continue on another worker; after SIGCONT it ends its old sequences and works again."""
    pid = fakes.pid("decode-0")
    try:
        met_in_flight(fakes, load, expected, "decode-0", signal.SIGSTOP)
    finally:
        os.kill(pid, signal.SIGCONT)
    fakes.assert_idle()
    assert fakes.pid("decode-0") == pid
    until_used(fakes, load[:7], expected[:7], "decode-0")


def until_used(fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer], decoder: str) -> None:
    """Send requests until the worker serves one of them."""

    def used() -> bool:
        runs = assert_undisturbed(fakes, load, expected, disturb=lambda: None, after_tokens=1)
        return any(run.reply.stats and run.reply.stats.decode_worker == decoder for run in runs)

    until(used, what=f"{decoder} is used again")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, SOAK_ROUNDS, PIECE_ROUNDS))
def test_kills_of_every_tier_in_turn(
    fakes: LocalCluster, fifty: list[FaultRequest], fifty_expected: list[Answer], first: int
) -> None:
    for number in range(first, first + PIECE_ROUNDS):
        rng = random.Random(number)
        for tier in TIERS:
            victim, after_tokens = tier[number % len(tier)], rng.randrange(1, len(fifty) * 20)
            print(kill_round(fakes, fifty, fifty_expected, victim, after_tokens=after_tokens))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_decode_worker_stopped_for_30_s(
    fakes: LocalCluster, fifty: list[FaultRequest], fifty_expected: list[Answer]
) -> None:
    """Longer than its lease in etcd and the ping of its connections."""
    pid = fakes.pid("decode-1")
    try:
        met_in_flight(fakes, fifty, fifty_expected, "decode-1", signal.SIGSTOP)
        until_s = time.monotonic() + STOPPED_S
        while time.monotonic() < until_s:
            assert_undisturbed(fakes, fifty, fifty_expected, disturb=lambda: None, after_tokens=1)
    finally:
        os.kill(pid, signal.SIGCONT)
    fakes.assert_idle()
    assert fakes.pid("decode-1") == pid
    until_used(fakes, fifty[:8], fifty_expected[:8], "decode-1")

"""The wall clock of every process jumps by hours, forward and back, while streams run: nothing changes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from bench.faults.fault_load import Answer, FaultRun, mixed_requests
from slipstream.v1 import router_pb2, router_pb2_grpc
from supervisor.commands.drain import drain_process, restart_process
from tests.support.clusters.disturbance import (
    assert_undisturbed,
    attempts_of,
    disturbed_in_flight,
    undisturbed,
)
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir
from tests.support.processes.launching import fork_launcher
from tests.support.processes.wall_clock import WallClock

LOAD = mixed_requests(14, tokens=32)
JUMPS_H = (3.0, -3.0, 0.0, 24.0 * 365, -1.0)


class Site:
    def __init__(self, cluster: LocalCluster, clock: WallClock, expected: list[Answer]) -> None:
        self.cluster, self.clock, self.expected = cluster, clock, expected
        self.jumps = 0

    def seen_hours(self) -> float:
        """Hours that the router's clock is ahead, by the time in its answers."""
        body = {"messages": [{"role": "user", "content": "what time is it?"}], "max_tokens": 1}
        request = urllib.request.Request(
            f"http://{self.cluster.http}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            created: float = json.load(answer)["created"]
            return (created - time.time()) / 3600

    def incarnation(self, instance: str) -> str:
        """The incarnation of this worker that the router uses; "" without one."""
        with grpc.insecure_channel(self.cluster.grpc) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            workers = stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=60).workers
        return next((w.incarnation for w in workers if w.instance == instance and w.ready), "")

    def runs_with_jumps(self, jumps_h: Sequence[float], *, every_s: float) -> list[FaultRun]:
        """Run the load with clock jumps from its middle on."""
        stop = threading.Event()

        def jump() -> None:
            for hours in itertools.cycle(jumps_h):
                self.clock.set(hours=hours)
                self.jumps += 1
                if stop.wait(every_s):
                    return

        jumper = threading.Thread(target=jump, daemon=True)
        began = self.jumps

        def jump_in_flight() -> None:
            """Jump while every stream is in flight; the gate opens when all jumps have happened."""
            jumper.start()
            until(lambda: self.jumps - began > len(jumps_h), what="the clock has jumped")

        try:
            return disturbed_in_flight(self.cluster, LOAD, self.expected, disturb=jump_in_flight)
        finally:
            stop.set()
            jumper.join(10)


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with lasting_dir(request, "clocks") as run_dir, lasting_dir(request, "shim") as shim:
        config = fake_engine_config(run_dir, pace_s=0.001)
        with (
            WallClock(shim) as clock,
            closing(fork_launcher()) as launcher,  # whose fork server has this clock, as no other has
            LocalCluster(config, wall_s=clock.now_s, launcher=launcher) as cluster,
        ):
            yield Site(cluster, clock, undisturbed(cluster, LOAD))
            cluster.assert_idle()


def test_streams_stay_on_their_workers(site: Site) -> None:
    restarts = {process.instance: process.restarts for process in site.cluster.supervisor.record().processes}

    def none_moved() -> bool:
        """Without a jump too, the router may hedge a slow prefill, so the test tries several rounds."""
        runs = site.runs_with_jumps(JUMPS_H, every_s=0.15)
        site.cluster.assert_idle()
        return attempts_of(runs) == [1] * len(LOAD)

    assert any(none_moved() for _ in range(5))
    site.clock.set(hours=-5.0)
    assert abs(site.seen_hours() + 5.0) < 0.1  # the processes use this clock
    after = {process.instance: process.restarts for process in site.cluster.supervisor.record().processes}
    assert after == restarts


def test_a_worker_that_starts_again_by_an_earlier_clock_is_taken_for_the_newer_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor, which names the incarnation, is in this process, and its clock goes back too."""
    monkeypatch.setattr("supervisor.process.new_incarnation", lambda: f"{1:x}-{os.urandom(4).hex()}")
    site.clock.set(hours=2.0)
    assert_undisturbed(site.cluster, LOAD[:4], site.expected[:4], disturb=lambda: None, after_tokens=1)
    site.cluster.assert_idle()
    site.clock.set(hours=-2.0)
    before = site.incarnation("decode-0")
    os.kill(site.cluster.pid("decode-0"), signal.SIGKILL)
    until(lambda: site.incarnation("decode-0") not in ("", before), what="the new run is in use")
    assert site.incarnation("decode-0") < before  # as text: the time in it is hours earlier
    log = Path(site.cluster.supervisor.record().find("decode-0").log)
    assert "belongs to a newer owner" not in log.read_text(errors="replace")
    assert_undisturbed(site.cluster, LOAD[:4], site.expected[:4], disturb=lambda: None, after_tokens=1)


@pytest.mark.soak
def test_a_drain_ends(site: Site) -> None:
    run_dir = Path(site.cluster.supervisor.record().run_dir)

    def drain_and_jump() -> None:
        site.clock.set(hours=7.0)
        drain_process(run_dir, "decode-1", timeout_s=300.0)

    drain = threading.Thread(target=drain_and_jump, daemon=True)
    assert_undisturbed(site.cluster, LOAD, site.expected, disturb=drain.start, after_tokens=len(LOAD) * 4)
    drain.join(300)
    assert site.cluster.state("decode-1") == "drained"
    site.clock.set(hours=0.0)
    restart_process(run_dir, "decode-1", timeout_s=300.0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_minutes_of_jumps(site: Site) -> None:
    until_s, rounds = time.monotonic() + 120.0, 0
    while time.monotonic() < until_s:
        site.runs_with_jumps(JUMPS_H, every_s=0.05)
        site.cluster.assert_idle()
        rounds += 1
    print(f"{rounds} rounds of {len(LOAD)} streams")

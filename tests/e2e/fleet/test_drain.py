"""Processes that drain under load drop no request, and exit."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from bench.faults.fault_load import Answer, FaultRequest, mixed_requests
from slipstream.credentials.user_name import user_name
from slipstream.operator_access import operator_dial
from supervisor.commands.drain import drain_process, restart_all, restart_process
from tests.support.clusters.disturbance import (
    assert_undisturbed,
    attempts_of,
    disturbed_in_flight,
    undisturbed,
)
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir

# A step of seven streams takes 42 ms: streams run all the time that processes restart, and leave them the
# cores.
DECODE_PACE_S = 0.006
TIERS = ("decode-0", "kvstore-0", "drafter-0", "router-0")
WAIT_S = 180.0


class Aside:
    """Runs a function in a thread beside the load; `join` raises its error."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert self.done
        if self._error is not None:
            raise self._error


@pytest.fixture(scope="module")
def fakes(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """As in conftest.py, with slower decode engines."""
    with lasting_dir(request, "drained") as directory:
        config = fake_engine_config(directory, pace_s=0.0003, decode_pace_s=DECODE_PACE_S, routers=2)
        with LocalCluster(config) as running:
            yield running


@pytest.fixture(scope="module")
def load() -> list[FaultRequest]:
    """Two of each kind; the hundred streams of `make soak` are one load more."""
    return mixed_requests(14, tokens=24)


def run_dir(cluster: LocalCluster) -> Path:
    return Path(cluster.supervisor.record().run_dir)


@pytest.fixture
def comes_back(fakes: LocalCluster) -> Iterator[list[str]]:
    """A list of instances; after the test they are in service again."""
    names: list[str] = []
    yield names
    for name in names:
        restart_process(run_dir(fakes), name, timeout_s=WAIT_S)


@pytest.mark.parametrize("instance", TIERS)
def test_a_drained_process_drops_no_stream_and_ends(
    fakes: LocalCluster,
    load: list[FaultRequest],
    expected: list[Answer],
    comes_back: list[str],
    instance: str,
) -> None:
    """The drain begins while streams are in flight; those of a decode worker move before the gate opens."""
    comes_back.append(instance)
    drain = Aside(lambda: drain_process(run_dir(fakes), instance, timeout_s=WAIT_S))
    said, moved = len(fakes.said), fakes.counted("slipstream_drain_failovers_total")

    def begin_to_leave() -> None:
        drain.start()
        if instance == "decode-0":
            until(lambda: fakes.counted("slipstream_drain_failovers_total") > moved, what="a stream leaves")

    runs = disturbed_in_flight(fakes, load, expected, disturb=begin_to_leave)
    drain.join()
    assert f"{instance} is drained: {user_name()} asked for it" in fakes.said[said:]
    assert fakes.state(instance) == "drained"
    if instance == "decode-0":
        assert max(attempts_of(runs)) > 1
    # The load runs without it.
    assert_undisturbed(fakes, load[:4], expected[:4], disturb=lambda: None, after_tokens=1)


def test_a_second_sigterm_ends_a_draining_router_at_once(fakes: LocalCluster) -> None:
    """It would wait for the answer of a plain HTTP client until the end of its drain time."""
    said, pid = len(fakes.said), fakes.pid("router-0")
    client = HTTPConnection(fakes.http, timeout=WAIT_S)
    with fakes.gate.held("prefill-0", "prefill-1"):
        body = json.dumps({"prompt": "Where is my order?", "max_tokens": 4})
        client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        until(lambda: fakes.status("router-0").load.requests_running, what="the request runs")
        os.kill(pid, signal.SIGTERM)
        until(lambda: fakes.status("router-0").draining, what="the router drains")
        os.kill(pid, signal.SIGTERM)
        until(lambda: any("router-0" in line for line in fakes.said[said:]), what="the router ended")
    client.close()
    assert fakes.said[said].startswith("router-0 was ended by SIGTERM; starting it again")
    fakes.until_running("router-0", but=pid)


def test_a_prefill_worker_that_is_drained_ends_its_prompts(
    fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer], comes_back: list[str]
) -> None:
    comes_back.append("prefill-0")
    drain = Aside(lambda: drain_process(run_dir(fakes), "prefill-0", timeout_s=WAIT_S))
    with fakes.gate.held("prefill-0") as gate:

        def begin_to_leave() -> None:
            until(lambda: fakes.sequences("prefill-0"), what="a prompt at prefill-0")
            drain.start()
            until(lambda: fakes.status("prefill-0").draining, what="prefill-0 drains")
            gate.open()

        assert_undisturbed(fakes, load, expected, disturb=begin_to_leave, after_tokens=0)
    drain.join()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_rolling_restart_under_load_fails_nothing(
    fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer]
) -> None:
    rolling(fakes, load, expected)


def test_a_restart_of_half_the_cluster_under_load_fails_nothing(
    fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer]
) -> None:
    def restart() -> None:
        for name in ("prefill-1", "decode-1", "router-1"):
            restart_process(run_dir(fakes), name, timeout_s=WAIT_S)

    under_load(fakes, load[:7], expected[:7], Aside(restart))


@pytest.fixture(scope="module")
def hundred(fakes: LocalCluster) -> tuple[list[FaultRequest], list[Answer]]:
    many = mixed_requests(100, tokens=200)
    return many, undisturbed(fakes, many)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("instance", ["decode-1", "prefill-1", "kvstore-0", "drafter-0", "router-0"])
def test_a_process_leaves_a_hundred_live_streams_in_ten_seconds(
    fakes: LocalCluster,
    hundred: tuple[list[FaultRequest], list[Answer]],
    comes_back: list[str],
    instance: str,
) -> None:
    """All hundred streams are in flight when the drain begins; the process exits in order and in time."""
    many, answers = hundred
    comes_back.append(instance)
    drain = Aside(lambda: drain_process(run_dir(fakes), instance, timeout_s=10.0))
    disturbed_in_flight(fakes, many, answers, disturb=drain.start)
    drain.join()
    ended = fakes.supervisor.record().find(instance)
    assert (ended.state, ended.exit_code) == ("drained", 0)


def rolling(fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer]) -> None:
    pids = {instance: fakes.pid(instance) for instance in fakes.workers}
    dial = operator_dial(run_dir(fakes))
    restart = Aside(lambda: restart_all(run_dir(fakes), timeout_s=WAIT_S, dial=dial))
    under_load(fakes, load, expected, restart)
    assert all(fakes.pid(instance) != pid for instance, pid in pids.items())


def under_load(fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer], aside: Aside) -> None:
    """Run the load repeatedly until `aside` is done."""
    assert_undisturbed(fakes, load, expected, disturb=aside.start, after_tokens=len(load) * 8)
    while not aside.done:
        assert_undisturbed(fakes, load, expected, disturb=lambda: None, after_tokens=1)
    aside.join()


def readiness(http: str) -> tuple[int, str]:
    """Status and state of a router's readiness page."""
    connection = HTTPConnection(http, timeout=60)
    connection.request("GET", "/healthz/ready")
    answer = connection.getresponse()
    return answer.status, json.load(answer)["status"]


def open_http_stream(http: str) -> HTTPResponse:
    """A streamed answer that has begun."""
    connection = HTTPConnection(http, timeout=WAIT_S)
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 40}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps({**body, "ignore_eos": True}), headers)
    answer = connection.getresponse()
    line = answer.readline()
    while line.startswith(b":") or line == b"\n":  # a keep-alive comment, where the first token takes long
        line = answer.readline()
    assert line.startswith(b"data: {")
    return answer


def test_a_draining_router_ends_its_http_streams_and_says_that_it_is_not_ready(
    fakes: LocalCluster, comes_back: list[str]
) -> None:
    """Without SDK and without resume: the whole answer comes from the router that drains."""
    comes_back.append("router-0")
    assert readiness(fakes.http) == (200, "ready")
    drain = Aside(lambda: drain_process(run_dir(fakes), "router-0", timeout_s=WAIT_S))
    with fakes.gate.held("decode-0", "decode-1", from_token=4) as gate:
        answer = open_http_stream(fakes.http)
        drain.start()
        until(lambda: readiness(fakes.http) == (503, "draining"), what="router-0 is not ready")
        refused = HTTPConnection(fakes.http, timeout=60)
        body = '{"messages": [{"role": "user", "content": "hello"}]}'
        refused.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        said = refused.getresponse()
        assert (said.status, said.headers["Connection"], said.headers["Retry-After"]) == (503, "close", "1")
        assert not drain.done
        gate.open()
        assert answer.read().endswith(b"data: [DONE]\n\n")
    drain.join()
    assert fakes.supervisor.record().find("router-0").exit_code == 0

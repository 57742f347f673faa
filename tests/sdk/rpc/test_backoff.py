"""After a fault is lifted every link carries again within the promised time, whatever had failed before."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster.discovery import LEASE_TTL_S
from libs.common.etcd import connection, lease, watch
from libs.common.etcd.channel import CHANNEL_OPTIONS as ETCD_OPTIONS
from libs.common.etcd.client import _READ_ATTEMPT_S, EtcdClient
from libs.common.rpc.serve import LIVENESS, ServiceHost
from libs.common.transport import incarnation_probe as beacon
from libs.common.transport import socket_read
from libs.worker.offload import block_writer
from libs.worker.restore import source_probes
from libs.worker.restore.source_breaker import SourceBreaker
from services.decode import speculation
from slipstream.calls import resume
from slipstream.rpc.backoff import (
    ANSWER_S,
    CHANNEL_PAUSE_MS,
    HEAL_S,
    LONGEST_PAUSE_S,
    PING_ANSWER_S,
    PING_S,
    Backoff,
)
from slipstream.rpc.dial import CHANNEL_OPTIONS, dial
from tests.support.defaults import keyword_defaults
from tests.support.network.fault_proxy import FaultProxy

ROOT = Path(__file__).parents[3]
# A retry loop of ours over a channel of gRPC: a call fails at once while the channel waits.
CHANNEL_JITTER = 0.2  # of gRPC
CHANNEL_S = CHANNEL_PAUSE_MS[1] / 1e3 * (1 + CHANNEL_JITTER)


@given(
    failed=st.lists(st.floats(0, 1), max_size=30),
    longest_s=st.floats(0.1, LONGEST_PAUSE_S),
    lifted_share=st.floats(0, 1),
    channel_s=st.floats(0, CHANNEL_S),
    lost_s=st.floats(0, ANSWER_S),
)
def test_a_link_heals_in_time(
    failed: list[float], longest_s: float, lifted_share: float, channel_s: float, lost_s: float
) -> None:
    """The fault is lifted somewhere in the last pause, or while a question waits that was lost, and the
    channel still waits for up to its longest time: the first attempt after that carries."""
    backoff = Backoff(longest_s=longest_s)
    for jitter in failed:
        backoff.pause_s(jitter)
    now_s = lost_s + backoff.pause_s() if lost_s else backoff.pause_s() * (1 - lifted_share)
    while now_s < channel_s:  # the call fails at once: the channel has not tried again yet
        now_s += backoff.pause_s()
    assert now_s <= HEAL_S
    backoff.succeeded()
    assert backoff.pause_s() == 0.1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_pauses_rise_to_the_longest_and_no_further(jitters: list[float]) -> None:
    backoff = Backoff(first_s=0.2, longest_s=1.5)
    full = 0.2
    for jitter in jitters:
        assert full / 2 <= backoff.pause_s(jitter) <= full <= 1.5
        full = min(2 * full, 1.5)


@pytest.mark.parametrize(("first_s", "longest_s"), [(0.0, 1.0), (2.0, 1.0), (0.1, LONGEST_PAUSE_S + 0.1)])
def test_a_backoff_that_heals_too_late_is_none(first_s: float, longest_s: float) -> None:
    with pytest.raises(ValueError):
        Backoff(first_s=first_s, longest_s=longest_s)


@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, ETCD_OPTIONS], ids=["workers", "etcd"])
def test_channels_wait_no_longer_than_they_may(options: list[tuple[str, int | str]]) -> None:
    named = {name: int(value) for name, value in options if name.endswith("backoff_ms")}
    assert named["grpc.max_reconnect_backoff_ms"] <= CHANNEL_PAUSE_MS[1]
    assert named["grpc.initial_reconnect_backoff_ms"] <= CHANNEL_PAUSE_MS[1]
    assert named["grpc.min_reconnect_backoff_ms"] <= CHANNEL_PAUSE_MS[1]


def etcd_pause_s() -> float:
    """The longest wait of etcd's channel between two attempts to connect."""
    return int(dict(ETCD_OPTIONS)["grpc.max_reconnect_backoff_ms"]) / 1e3 * (1 + CHANNEL_JITTER)


# Every way back into use: (its longest pause, how long it waits for an answer that may be lost, its channel).
WAYS = {
    "a worker's load, and its KV events": (LONGEST_PAUSE_S, ANSWER_S, CHANNEL_S),
    "sources of KV: probes": (source_probes.PROBE_EVERY_S, source_probes.PROBE_TIMEOUT_S, CHANNEL_S),
    "the kvstore as a place to write to": (
        block_writer._BACK_OFF_S,
        block_writer._RESERVE_TIMEOUT_S,
        CHANNEL_S,
    ),
    "the drafter": (speculation._RETRY_S, speculation._CONNECT_S, speculation._CONNECT_S),
    "KV bytes over sockets": (0.0, socket_read.PROGRESS_TIMEOUT_S, 0.0),
    "KV bytes over Mooncake": (0.0, beacon.GREET_TIMEOUT_S + socket_read.PROGRESS_TIMEOUT_S, 0.0),
    "a client's stream": (resume._LONGEST_PAUSE_S, 0.0, CHANNEL_S),
    "a watch of etcd": (watch._LONGEST_PAUSE_S, max(watch._OPEN_TIMEOUT_S, _READ_ATTEMPT_S), etcd_pause_s()),
    "a lease in etcd": (
        lease._LONGEST_PAUSE_S,
        # Of a renewal at its earliest, or of any other call.
        max(LEASE_TTL_S * 2 / 3 / 2, keyword_defaults(EtcdClient.__init__)["timeout_s"]),
        etcd_pause_s(),
    ),
}


@pytest.mark.parametrize(("pause_s", "lost_s", "channel_s"), WAYS.values(), ids=WAYS)
def test_what_every_way_back_waits_for_adds_up(pause_s: float, lost_s: float, channel_s: float) -> None:
    """Either the answer was lost, or the client had to open a new channel."""
    assert pause_s + max(lost_s, channel_s) <= HEAL_S


def test_a_connection_that_the_network_forgot_is_noticed_in_time() -> None:
    """Only pings detect the loss; then the client opens a new channel after the first pause."""
    named = dict(CHANNEL_OPTIONS)
    silence_s, answer_s = named["grpc.keepalive_time_ms"] / 1e3, named["grpc.keepalive_timeout_ms"] / 1e3
    assert named["grpc.http2.ping_timeout_ms"] == named["grpc.keepalive_timeout_ms"]
    assert silence_s + answer_s + CHANNEL_PAUSE_MS[0] / 1e3 * (1 + CHANNEL_JITTER) + 0.1 <= HEAL_S


FIRST_PAUSES_S = {
    "a worker's load, and its KV events": 0.1,
    "the kvstore as a place to write to": block_writer._BACK_OFF_S,
}


@pytest.mark.parametrize("pause_s", FIRST_PAUSES_S.values(), ids=FIRST_PAUSES_S)
def test_who_uses_a_connection_that_the_network_forgot_uses_another_in_time(pause_s: float) -> None:
    """What was under way fails when the ping is not answered; then comes the first pause of its way back, or
    the only one of a way whose pauses do not rise."""
    assert PING_S + PING_ANSWER_S + CHANNEL_PAUSE_MS[0] / 1e3 * (1 + CHANNEL_JITTER) + pause_s <= HEAL_S


def test_an_etcd_connection_that_the_network_forgot_is_replaced_in_time() -> None:
    """By a read, not by pings, of which etcd bears one in 5 s. A change that was sent just before has its
    time; reads, renewals and watches end with the connection. Then comes a first pause."""
    noticed_s = connection.PROBE_AFTER_S + connection.PROBE_TIMEOUT_S
    change_s = keyword_defaults(EtcdClient.__init__)["timeout_s"]
    assert noticed_s + change_s + 0.1 <= HEAL_S
    assert noticed_s + watch._FIRST_PAUSE_S + _READ_ATTEMPT_S <= HEAL_S


async def test_a_stream_over_a_connection_that_the_network_forgot_breaks() -> None:
    """And calls are answered again. gRPC's own limit, without ours, is a minute."""
    host = ServiceHost("127.0.0.1:0")
    health: health_pb2_grpc.HealthAsyncStub
    await host.start([])
    try:
        async with FaultProxy(host.endpoint) as proxy, dial(proxy.endpoint) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            proxy.drop_state()
            async with asyncio.timeout(45):
                with pytest.raises(grpc.aio.AioRpcError):
                    await watch.read()
                while not await is_answered(health):
                    await asyncio.sleep(0.02)
    finally:
        await host.stop(grace_s=0)


async def is_answered(health: health_pb2_grpc.HealthAsyncStub) -> bool:
    """A call may still be given to a connection that is being closed."""
    try:
        await health.Check(health_pb2.HealthCheckRequest(service=LIVENESS), timeout=45, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    return True


@given(
    trials_s=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 2)), max_size=12),
    probe_lost_s=st.floats(0, source_probes.PROBE_TIMEOUT_S + source_probes.PROBE_EVERY_S),
    trial_under_way_s=st.floats(0, socket_read.PROGRESS_TIMEOUT_S),
)
def test_a_source_of_kv_is_asked_again_in_time(
    trials_s: list[tuple[float, float]], probe_lost_s: float, trial_under_way_s: float
) -> None:
    """It failed again and again, and once more by what was under way when the fault was lifted: either a
    trial, whose read makes no progress, or a probe that is lost."""
    health, now_s = SourceBreaker(), 0.0
    health.record_failure("x", now_s=now_s)
    for pause_s, lasts_s in trials_s:
        now_s += pause_s
        health.record_probe("x")
        if health.may_ask("x", now_s=now_s):
            now_s += lasts_s
            health.record_failure("x", now_s=now_s)
    lifted_s = now_s
    health.record_probe("x")
    if health.may_ask("x", now_s=now_s):
        now_s += trial_under_way_s
        health.record_failure("x", now_s=now_s)
    elif health.next_probe_s("x", now_s=now_s) is not None:
        now_s += probe_lost_s
    at_s = health.next_probe_s("x", now_s=now_s)
    health.record_probe("x")
    now_s = max(now_s, at_s if at_s is not None else now_s)
    while not health.may_ask("x", now_s=now_s):
        now_s += 0.01
    assert now_s - lifted_s <= HEAL_S


def constants(node: ast.stmt) -> Iterator[tuple[str, float]]:
    """Names and numbers of an assignment, `A = 1.0` or `A, B = 1.0, 2.0`."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    value = getattr(node, "value", None)
    pairs: list[tuple[object, object]] = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=True))
    for name, number in pairs:
        found = number.value if isinstance(number, ast.Constant) else None
        if isinstance(name, ast.Name) and isinstance(found, int | float):
            yield name.id, float(found)


def test_no_other_retry_pauses_longer() -> None:
    """Constants of the product that say how long something is left alone after it failed, in seconds."""
    late = {}
    for file in [*(ROOT / "libs").rglob("*.py"), *(ROOT / "services").rglob("*.py")]:
        for node in ast.parse(file.read_text()).body:
            for name, value in constants(node):
                pauses = any(part in name for part in ("RETRY_S", "BACK_OFF_S", "PAUSE_S", "SILENCE_S"))
                if pauses and value > LONGEST_PAUSE_S:
                    late[f"{file.relative_to(ROOT)}: {name}"] = value
    assert late == {
        # Not links: a full disk, a process that ends as soon as it is started, a worker that says it does not
        # serve events, a job that fails again, a webhook's receiver, and a drafter that reads no rows, which
        # get there in messages meanwhile.
        "services/decode/draft_exports.py: _UNREAD_PAUSE_S": 30.0,
        "services/kvstore/disk/tier.py: FULL_RETRY_S": 5.0,
        "services/kvstore/pool/agent_client.py: MAX_PAUSE_S": 5.0,
        "services/router/workers/kv_event_subscriber.py: _UNSERVED_RETRY_S": 30.0,
        "services/router/jobs/decisions.py: LONGEST_RETRY_S": 300.0,
        "services/router/jobs/webhooks/message.py: _FIRST_RETRY_S": 5.0,
        "services/router/jobs/webhooks/message.py: _LONGEST_RETRY_S": 3600.0,
    }

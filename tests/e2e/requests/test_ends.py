"""After every kind of end all ledgers are empty; a fixture asserts this after each test."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest

from slipstream import errors
from tests.support.clusters.disturbance import DECODERS
from tests.support.clusters.local_cluster import PATIENCE_S, LocalCluster, until

LONG: dict[str, Any] = {"temperature": 0.0, "max_tokens": 2000, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Where is my order 482135? " * 40}]


@pytest.mark.parametrize("after_events", [0, 1, 2, 5, 20])
def test_cancel_after_some_tokens(cluster: LocalCluster, after_events: int) -> None:
    stream = cluster.client.stream_chat(MESSAGES, **LONG)
    events = iter(stream)
    for _ in range(after_events):
        next(events, None)
    stream.close()


def test_abort_by_id(cluster: LocalCluster) -> None:
    with cluster.gate.held(*DECODERS, from_token=20):
        stream = cluster.client.stream_chat(MESSAGES, request_id="to-abort", **LONG)
        next(iter(stream))
        cluster.client.abort("to-abort", timeout_s=PATIENCE_S)
        until(lambda: not cluster.held(), what="released after Abort")
        stream.close()


def test_a_deadline_ends_the_request_with_its_own_error(cluster: LocalCluster) -> None:
    """The engine is held, so the request cannot end before its deadline. The router refuses a deadline that
    is too short at once; then the test tries a longer one."""
    with cluster.gate.held(*DECODERS, from_token=20):
        for deadline_s in (0.5, 2.0, 8.0, 32.0):
            with pytest.raises((errors.DeadlineExceeded, errors.Overloaded)) as ended:
                cluster.client.chat(MESSAGES, timeout_s=deadline_s, **LONG)
            if ended.type is errors.DeadlineExceeded:
                return
    raise AssertionError("no deadline was long enough to begin with")


def test_a_client_that_hangs_up(cluster: LocalCluster) -> None:
    body = json.dumps({"messages": MESSAGES, "stream": True, "max_tokens": 2000, "temperature": 0})
    connection = http.client.HTTPConnection(cluster.http, timeout=300)
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    assert connection.getresponse().read(20)
    assert isinstance(connection.sock, socket.socket) or connection.sock is None
    connection.close()


def test_refused_input_takes_nothing(cluster: LocalCluster) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        cluster.client.chat(MESSAGES, temperature=9.0)
    assert caught.value.field == "temperature"
    with pytest.raises(errors.InvalidArgument):
        cluster.client.chat([{"role": "user", "content": "x " * 40_000}])


def test_many_at_once_and_all_kinds_of_ends(cluster: LocalCluster) -> None:
    streams = [
        cluster.client.stream_chat(MESSAGES, seed=n, temperature=1.0, max_tokens=40) for n in range(12)
    ]
    for number, stream in enumerate(streams):
        if number % 3 == 0:
            stream.close()
    finished = 0
    for number, stream in enumerate(streams):
        if number % 3:
            for _ in stream:
                pass
            finished += stream.reply.finish_reason in ("stop", "length", "tool_calls")
    assert finished == 8

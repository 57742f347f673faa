"""A router dies: clients with a second router resume there, with the same text and no token twice."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from bench.faults.fault_load import Answer, FaultRequest
from slipstream.client import Client
from slipstream.requests import GenerateArguments
from tests.support.clusters.disturbance import DECODERS, assert_undisturbed, disturbed_in_flight
from tests.support.clusters.local_cluster import PATIENCE_S, LocalCluster


@pytest.mark.parametrize("in_flight", [False, True])
def test_streams_outlive_their_router(
    fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer], in_flight: bool
) -> None:
    """The kill comes while streams begin, or when all of them are in the middle of their tokens."""
    pid = fakes.pid("router-0")
    kill = partial(os.kill, pid, signal.SIGKILL)
    if in_flight:
        runs = disturbed_in_flight(fakes, load, expected, disturb=kill)
        assert all(run.moved for run in runs)  # every client begins at the first router of its list
    else:
        assert_undisturbed(fakes, load, expected, disturb=kill, after_tokens=1)
    fakes.until_running("router-0", but=pid)


def test_the_blocking_client_resumes_too(fakes: LocalCluster) -> None:
    """The request is unseeded: the seed derives from the id, which the client draws."""
    question = [{"role": "user", "content": "Where is order 4711?"}]
    arguments: GenerateArguments = {
        "temperature": 1.0,
        "max_tokens": 80,
        "ignore_eos": True,
        "request_id": "goes-on",
    }
    with Client(",".join(fakes.routers), resume_within_s=PATIENCE_S) as client:
        whole = client.chat(question, **arguments)
        with fakes.gate.held(*DECODERS, from_token=40) as gate:
            stream = client.stream_chat(question, **arguments)
            began_at, pieces = stream.endpoint, []
            router = f"router-{fakes.routers.index(began_at)}"
            pid = fakes.pid(router)
            for event in stream:
                pieces.append(event.text)
                if event.completion_tokens >= 20 and stream.endpoint == began_at and fakes.running(router):
                    os.kill(pid, signal.SIGKILL)
                    gate.open()
        assert stream.endpoint != began_at
        assert "".join(pieces) == stream.reply.text
        assert stream.reply.as_message() == whole.as_message()
        assert stream.reply.usage is not None
        assert stream.reply.usage.completion_tokens == 80
    fakes.until_running(router, but=pid)

"""A router dies: clients that know another one go on there, with the same text and nothing doubled."""

from __future__ import annotations

import os
import signal

import pytest

from bench.fault_load import Answer, FaultRequest
from slipstream.client import Client
from tests.support.disturbance import assert_undisturbed
from tests.support.local_cluster import LocalCluster, until


@pytest.mark.parametrize("after_tokens", [1, 1000])
def test_streams_outlive_their_router(
    fakes: LocalCluster, load: list[FaultRequest], expected: list[Answer], after_tokens: int
) -> None:
    restarts = fakes.supervisor.record().find("router-0").restarts

    def kill() -> None:
        os.kill(fakes.pid("router-0"), signal.SIGKILL)

    assert_undisturbed(fakes, load, expected, disturb=kill, after_tokens=after_tokens)

    def back() -> bool:
        return fakes.supervisor.record().find("router-0").restarts > restarts and (
            fakes.state("router-0") == "ready"
        )

    until(back, timeout_s=60, what="router-0 is back")


def test_the_blocking_client_goes_on_too(fakes: LocalCluster) -> None:
    """Unseeded: the seed follows from the id, which the client draws."""
    question = [{"role": "user", "content": "Where is order 4711?"}]
    arguments = {"temperature": 1.0, "max_tokens": 300, "ignore_eos": True, "request_id": "goes-on"}
    with Client(",".join(fakes.routers)) as client:
        whole = client.chat(question, **arguments)
        stream = client.stream_chat(question, **arguments)
        began_at, pieces = stream.endpoint, []
        for number, event in enumerate(stream):
            pieces.append(event.text)
            if number == 20:
                os.kill(fakes.pid(f"router-{fakes.routers.index(began_at)}"), signal.SIGKILL)
        assert stream.endpoint != began_at
        assert "".join(pieces) == stream.reply.text
        assert stream.reply.as_message() == whole.as_message()
        assert stream.reply.usage is not None
        assert stream.reply.usage.completion_tokens == 300
    until(lambda: all(fakes.state(f"router-{n}") == "ready" for n in (0, 1)), timeout_s=60, what="back")

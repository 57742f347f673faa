"""Fuzzed messages and metadata to RouterService: refused as bad input, and nothing of them stays."""

from __future__ import annotations

import logging
import random

import pytest

from services.router.server import RouterServer
from slipstream.rpc.dial import dial
from slipstream.v1 import common_pb2, router_pb2
from tests.router.conftest import HELLO, chat_of, eventually
from tests.router.support.fake_cluster import FakeCluster
from tests.support.fuzz.rpc_fuzzer import RpcFuzzer, fuzz

SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"]
HEADERS: dict[str, tuple[str | bytes, ...]] = {
    "x-session-affinity": ("s", "a" * 257, ""),
    "x-session-affinity-bin": (b"\xff\xfe", b"caf\xc3\xa9", b"", b"\x00"),
    "x-slipstream-attempt": ("1", "2", "-1", "99999999999", "x"),
    "x-slipstream-priority": ("bulk", "interactive", "none"),
    "x-slipstream-prefill": ("prefill-0", "none"),
    "x-slipstream-debug": ("1",),
    "traceparent": ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "zz"),
    "authorization": ("Bearer x", "bearer", ""),
}


def seeds() -> list[router_pb2.GenerateRequest | common_pb2.Attempt]:
    chat = chat_of(HELLO)
    tool = router_pb2.Tool(name="find", description="finds", parameters='{"type": "object"}')
    with_tools = router_pb2.Chat(messages=chat.messages, tools=[tool])
    sampling = router_pb2.Sampling(max_tokens=3, temperature=0.5, top_logprobs=2)
    return [
        router_pb2.GenerateRequest(chat=chat, sampling=sampling),
        router_pb2.GenerateRequest(chat=with_tools, sampling=sampling, stop=["x"], metadata={"k": "v"}),
        router_pb2.GenerateRequest(prompt="once", sampling=sampling, request_id="r-1"),
    ]


async def test_fuzzed_messages_are_refused_as_bad_input(
    router: RouterServer, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    await check(router, cluster, caplog, inputs=2000)


@pytest.mark.soak
async def test_a_million_fuzzed_messages_are_refused(
    router: RouterServer, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    await check(router, cluster, caplog, inputs=1_000_000)


async def check(
    router: RouterServer, cluster: FakeCluster, caplog: pytest.LogCaptureFixture, *, inputs: int
) -> None:
    async def nothing_held() -> None:
        await eventually(lambda: not router.runs.held and not cluster.held)

    async with dial(router.host.endpoint) as channel:
        fuzzer = RpcFuzzer(channel, SERVICE, random.Random(15), seeds(), headers=HEADERS)
        await fuzz(fuzzer, inputs, settle=nothing_held)
    assert fuzzer.statuses["Generate OK"]  # some requests were valid, and ran
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

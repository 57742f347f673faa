"""Fuzzed messages and metadata to RouterService: refused as bad input, and nothing of them stays."""

from __future__ import annotations

import logging
import random

import pytest

from services.router.server import RouterServer
from slipstream.rpc.dial import dial
from slipstream.v1 import router_pb2
from tests.router.conftest import eventually
from tests.router.support.fake_cluster import FakeCluster
from tests.support.fuzz.rpc_fuzzer import RpcFuzzer, fuzz
from tests.support.fuzz.seeds import HEADERS, router_seeds

SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"]


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
        fuzzer = RpcFuzzer(channel, SERVICE, random.Random(15), router_seeds(), headers=HEADERS)
        await fuzz(fuzzer, inputs, settle=nothing_held)
    assert fuzzer.statuses["Generate OK"]  # some requests were valid, and ran
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

"""Malformed HTTP messages to the router: refused as bad input, and nothing of them stays."""

from __future__ import annotations

import logging
import random

import pytest

from libs.common.cluster.worker_service import resident_bytes
from services.router.server import RouterServer
from tests.router.conftest import eventually
from tests.router.support.fake_cluster import FakeCluster
from tests.support.fuzz.http_fuzzer import HttpFuzzer

MAX_GROWTH_BYTES = 20 << 20


@pytest.fixture(autouse=True)
def unrecorded_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Keep pytest from holding the messages, which would be this process's growth."""
    caplog.set_level(logging.CRITICAL, "aiohttp.server")


async def test_malformed_messages_are_refused_as_bad_input(
    router: RouterServer, cluster: FakeCluster
) -> None:
    await check(router, cluster, inputs=2000)


@pytest.mark.soak
async def test_a_million_malformed_messages_are_refused(router: RouterServer, cluster: FakeCluster) -> None:
    await check(router, cluster, inputs=1_000_000)


async def check(router: RouterServer, cluster: FakeCluster, *, inputs: int) -> None:
    async def nothing_held() -> None:
        await eventually(lambda: not router.runs.held and not cluster.held)

    fuzzer = HttpFuzzer(int(router.http_endpoint.rpartition(":")[2]), random.Random(15))
    await fuzzer.run(inputs // 4)
    await nothing_held()
    before = resident_bytes()
    await fuzzer.run(inputs)
    await nothing_held()
    fuzzer.check()
    assert resident_bytes() - before < MAX_GROWTH_BYTES

"""Malformed HTTP messages to both ports of a router: refused as bad input, and nothing of them stays."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.common.cluster.worker_service import resident_bytes
from libs.database.database import open_database
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from tests.router.conftest import eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.fuzz.http_fuzzer import HttpFuzzer
from tests.support.fuzz.http_routes import admin_port, public_port

MAX_GROWTH_BYTES = 20 << 20


@pytest.fixture(autouse=True)
def unrecorded_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Keep pytest from holding the messages, which would be this process's growth."""
    caplog.set_level(logging.CRITICAL, "aiohttp.server")


@pytest.fixture
async def router(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[RouterServer]:
    database = open_database(f"sqlite:{tmp_path}/jobs.db")
    async with open_router(cluster, card, database=database) as server:
        yield server
    await database.close()


@pytest.mark.parametrize("port", ["public", "admin"])
async def test_malformed_messages_are_refused_as_bad_input(
    port: str, router: RouterServer, cluster: FakeCluster
) -> None:
    await check(port, router, cluster, inputs=2000)


@pytest.mark.soak
@pytest.mark.parametrize("port", ["public", "admin"])
async def test_a_million_malformed_messages_are_refused(
    port: str, router: RouterServer, cluster: FakeCluster
) -> None:
    await check(port, router, cluster, inputs=1_000_000)


async def check(port: str, router: RouterServer, cluster: FakeCluster, *, inputs: int) -> None:
    async def nothing_held() -> None:
        await eventually(lambda: not router.manager.held and not cluster.held)

    is_public = port == "public"
    endpoint = router.http_endpoint if is_public else router.admin_http_endpoint
    serves = public_port(router.pipeline.card.name) if is_public else admin_port()
    fuzzer = HttpFuzzer(int(endpoint.rpartition(":")[2]), serves, random.Random(15))
    await fuzzer.reach_routes()
    await fuzzer.run(inputs // 4)
    await nothing_held()
    before = resident_bytes()
    await fuzzer.run(inputs)
    await nothing_held()
    fuzzer.check()
    assert resident_bytes() - before < MAX_GROWTH_BYTES

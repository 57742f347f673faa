"""Fuzzed messages and metadata to a router's services: refused as bad input, and nothing of them stays."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from libs.database.database import open_database
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.keda import externalscaler_pb2
from slipstream.rpc.dial import dial
from slipstream.v1 import autoscale_pb2, batches_pb2, fleet_pb2, jobs_pb2, responses_pb2, router_pb2
from tests.router.conftest import eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.fuzz.rpc_fuzzer import RpcFuzzer, fuzz
from tests.support.fuzz.seeds import (
    HEADERS,
    batch_seeds,
    job_seeds,
    operator_seeds,
    response_seeds,
    router_seeds,
)
from tests.support.logged_errors import logged_errors


class Fuzzed(NamedTuple):
    """A service, valid messages of it, and a method with a status that a part of its inputs has."""

    file: Any
    name: str
    seeds: Sequence[Message]
    reached: str
    is_public: bool = False
    headers: Mapping[str, Sequence[str | bytes]] = {}

    @property
    def descriptor(self) -> ServiceDescriptor:
        found: ServiceDescriptor = self.file.DESCRIPTOR.services_by_name[self.name]
        return found


SERVICES = [
    Fuzzed(router_pb2, "RouterService", router_seeds(), "Generate OK", True, HEADERS),
    Fuzzed(jobs_pb2, "JobService", job_seeds(), "SubmitJobs OK", True),
    Fuzzed(batches_pb2, "BatchService", batch_seeds(), "ListFiles OK", True),
    Fuzzed(responses_pb2, "ResponseService", response_seeds(), "GetResponse NOT_FOUND", True),
    Fuzzed(fleet_pb2, "FleetService", operator_seeds(), "CallProcess NOT_FOUND"),
    Fuzzed(autoscale_pb2, "AutoscaleService", operator_seeds(), "GetRecommendations OK"),
    Fuzzed(externalscaler_pb2, "ExternalScaler", operator_seeds(), "GetMetrics OK"),
]


@pytest.fixture
async def router(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[RouterServer]:
    database = open_database(f"sqlite:{tmp_path}/jobs.db")
    async with open_router(cluster, card, database=database) as server:
        yield server
    await database.close()


@pytest.mark.parametrize("fuzzed", SERVICES, ids=lambda fuzzed: fuzzed.name)
async def test_fuzzed_messages_are_refused_as_bad_input(
    fuzzed: Fuzzed, router: RouterServer, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    await check(fuzzed, router, cluster, caplog)


@pytest.mark.soak
@pytest.mark.parametrize("fuzzed", SERVICES, ids=lambda fuzzed: fuzzed.name)
async def test_a_million_fuzzed_messages_are_refused(
    fuzzed: Fuzzed, router: RouterServer, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    await check(fuzzed, router, cluster, caplog, inputs=1_000_000)


async def check(
    fuzzed: Fuzzed,
    router: RouterServer,
    cluster: FakeCluster,
    caplog: pytest.LogCaptureFixture,
    inputs: int | None = None,
) -> None:
    async def nothing_held() -> None:
        await eventually(lambda: not router.manager.held and not cluster.held)

    host = router.host if fuzzed.is_public else router.admin
    async with dial(host.endpoint) as channel:
        fuzzer = RpcFuzzer(
            channel, fuzzed.descriptor, random.Random(15), fuzzed.seeds, headers=fuzzed.headers
        )
        await fuzz(fuzzer, inputs, settle=nothing_held)
    assert fuzzer.statuses[fuzzed.reached], fuzzer.statuses
    assert not logged_errors(caplog)

"""KEDA's external scaler on the admin port, before workers whose load reports the test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from bench.autoscale.hpa import PERIOD_S, HpaController
from libs.common.cluster.discovery import InMemoryDiscovery
from libs.common.cluster.placements import InMemoryPlacements
from libs.common.cluster.worker_record import Role
from services.router.autoscale.types import AutoscalePolicy, TierLimits
from services.router.options import RouterOptions
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from slipstream.errors import Unavailable
from slipstream.keda import externalscaler_pb2 as keda
from slipstream.keda import externalscaler_pb2_grpc
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import dial
from slipstream.v1 import worker_pb2
from tests.router.conftest import HELLO, WAIT_S, eventually
from tests.router.support.fake_workers import FakeWorker

TOKENS_PER_S = 10_000.0
POLICY = AutoscalePolicy(limits={role: TierLimits(0, 8) for role in Role})


class ReportedTier:
    """Prefill workers over real gRPC, with the reports that `load` sets."""

    def __init__(self, discovery: InMemoryDiscovery) -> None:
        self._discovery = discovery
        self._started = 0
        self.workers: list[FakeWorker] = []
        self._reports = 0  # reports differ in their free blocks

    async def resize(self, n: int) -> None:
        while len(self.workers) > n:
            await self.workers.pop().stop()
        while len(self.workers) < n:
            self.workers.append(FakeWorker(Role.PREFILL, f"prefill-{self._started}", self._discovery))
            self._started += 1
            await self.workers[-1].start()

    def report(self, **fields: Any) -> None:
        self._reports += 1
        fields["blocks_free"] = self._reports
        for worker in self.workers:
            worker.process.stated_load = worker_pb2.LoadReport(prefill_tokens_per_s=TOKENS_PER_S, **fields)
            worker.service.load_changed()

    async def wait_seen(self, router: RouterServer) -> None:
        """Until the router has the reports."""

        def seen() -> list[int]:
            reports = [link.report for link in router.fleet.links_of(Role.PREFILL)]
            return [report.blocks_free for report in reports if report is not None]

        await eventually(lambda: seen() == [self._reports] * len(self.workers))


@asynccontextmanager
async def running_router(
    card: ModelCard, discovery: InMemoryDiscovery, instance: str = "router-0", **options: Any
) -> AsyncIterator[RouterServer]:
    given = {"autoscale": POLICY, "silence_s": WAIT_S, "recovery_wait_s": 0.0, **options}
    server = RouterServer(card, discovery, InMemoryPlacements(), RouterOptions(instance, **given))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=0.2)


@asynccontextmanager
async def scaler_of(router: RouterServer) -> AsyncIterator[externalscaler_pb2_grpc.ExternalScalerAsyncStub]:
    async with dial(router.admin.endpoint) as channel:
        yield externalscaler_pb2_grpc.ExternalScalerStub(channel)


def of(tier: str) -> keda.ScaledObjectRef:
    return keda.ScaledObjectRef(name="any", namespace="default", scalerMetadata={"tier": tier})


async def total(scaler: externalscaler_pb2_grpc.ExternalScalerAsyncStub, tier: str = "prefill") -> float:
    request = keda.GetMetricsRequest(scaledObjectRef=of(tier), metricName=f"slipstream-{tier}-replicas")
    answer = await scaler.GetMetrics(request, timeout=WAIT_S)
    assert [value.metricName for value in answer.metricValues] == [request.metricName]
    return answer.metricValues[0].metricValueFloat


async def test_hpa_follows_a_load_that_rises_and_falls(card: ModelCard) -> None:
    """Work for three workers comes for ten minutes of a virtual clock, then none."""
    discovery = InMemoryDiscovery()
    tier, hpa = ReportedTier(discovery), HpaController(least=1, most=8)
    await tier.resize(1)
    sizes: list[int] = []
    backlog_s = 0.0
    async with running_router(card, discovery) as router, scaler_of(router) as scaler:
        for period in range(70):
            n, arrives = len(tier.workers), 3.0 if period < 40 else 0.0
            offered_s = backlog_s + arrives * PERIOD_S
            done_s = min(offered_s, n * PERIOD_S)
            backlog_s = offered_s - done_s
            tokens = int(backlog_s * TOKENS_PER_S / n)
            tier.report(
                requests_running=8, prefill_tokens_in_flight=tokens, busy_share=done_s / (n * PERIOD_S)
            )
            await tier.wait_seen(router)
            wanted = hpa.step(period * PERIOD_S, replicas=n, total=await total(scaler))
            sizes.append(wanted)
            await tier.resize(wanted)
        for worker in tier.workers:
            await worker.stop()
    assert sizes[:2] == [5, 7], "a backlog grows the tier as fast as HPA allows, a busy tier further"
    assert sizes[39] == 4, "three workers' work at an aim of 75 % busy"
    assert set(sizes[30:55]) == {4}, "steady under steady load, and until the window is over"
    assert sizes[-1] == 1


async def test_every_router_gives_the_same_answer(card: ModelCard) -> None:
    discovery = InMemoryDiscovery()
    tier = ReportedTier(discovery)
    await tier.resize(2)
    async with (
        running_router(card, discovery, "router-0") as first,
        running_router(card, discovery, "router-1") as second,
    ):
        tier.report(requests_running=2, prefill_tokens_in_flight=20_000)
        for router in (first, second):
            await tier.wait_seen(router)
        # What waits at one router only.
        first.load = waiting  # type: ignore[method-assign]
        first.signals._load = waiting
        async with scaler_of(first) as one, scaler_of(second) as other:
            async with asyncio.timeout(WAIT_S):
                while (await total(one), await total(other)) != (4.0, 4.0):
                    await asyncio.sleep(0.05)
            active = keda.IsActiveResponse(result=True)
            assert await one.IsActive(of("drafter")) == await other.IsActive(of("drafter")) == active
    for worker in tier.workers:
        await worker.stop()


def waiting() -> worker_pb2.LoadReport:
    """A router's report with 6 s of one worker's work in its queue."""
    return worker_pb2.LoadReport(requests_waiting=1, prefill_tokens_in_flight=60_000)


async def _ask(router: RouterServer) -> None:
    async with AsyncClient(router.host.endpoint, timeout_s=WAIT_S) as client:
        await client.chat(HELLO, max_tokens=4)


async def test_a_request_without_workers_wakes_its_tiers_by_push(card: ModelCard) -> None:
    async with (
        running_router(card, InMemoryDiscovery()) as router,
        scaler_of(router) as scaler,
    ):
        stream = scaler.StreamIsActive(of("decode"))
        assert await stream.read() == keda.IsActiveResponse(result=False)
        assert await total(scaler, "decode") == 0.0
        refused = asyncio.create_task(_ask(router))
        assert await asyncio.wait_for(stream.read(), WAIT_S) == keda.IsActiveResponse(result=True)
        assert await total(scaler, "decode") == 1.0
        with pytest.raises(Unavailable):
            await refused
        answer = await scaler.IsActive(of("decode"), timeout=WAIT_S)
        assert answer.result, "a request was refused a moment ago"


async def test_metric_names_and_targets_are_those_of_hpas_that_exist(card: ModelCard) -> None:
    async with running_router(card, InMemoryDiscovery()) as router, scaler_of(router) as scaler:
        specs = [(await scaler.GetMetricSpec(of(tier), timeout=WAIT_S)).metricSpecs for tier in Role]
    assert [
        [(spec.metricName, spec.targetSize, spec.targetSizeFloat) for spec in each] for each in specs
    ] == [
        [(name, 1, 1.0)]
        for name in (
            "slipstream-router-replicas",
            "slipstream-prefill-replicas",
            "slipstream-decode-replicas",
            "slipstream-kvstore-replicas",
            "slipstream-drafter-replicas",
        )
    ]


@pytest.mark.parametrize("method", ["IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics"])
@pytest.mark.parametrize("tier", ["", "prefil", "x" * 5000])
async def test_a_wrong_tier_is_refused_by_name(card: ModelCard, method: str, tier: str) -> None:
    async with running_router(card, InMemoryDiscovery()) as router, scaler_of(router) as scaler:
        request: Any = of(tier)
        if method == "GetMetrics":
            request = keda.GetMetricsRequest(scaledObjectRef=request)
        call = getattr(scaler, method)(request, timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (call.read() if method == "StreamIsActive" else call)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (refused.value.details() or "").startswith("tier")


async def test_a_metric_of_another_tier_is_refused(card: ModelCard) -> None:
    async with running_router(card, InMemoryDiscovery()) as router, scaler_of(router) as scaler:
        request = keda.GetMetricsRequest(
            scaledObjectRef=of("decode"), metricName="slipstream-prefill-replicas"
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await scaler.GetMetrics(request, timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (refused.value.details() or "").startswith("metricName")


@pytest.mark.parametrize("is_public", [False, True])
async def test_the_flag_opens_exactly_the_scalers_methods(card: ModelCard, is_public: bool) -> None:
    secret = ClusterSecret(b"s" * 32)
    options: dict[str, Any] = {"secret": secret, "scaler_is_public": is_public}
    async with running_router(card, InMemoryDiscovery(), **options) as router:
        statuses: dict[str, grpc.StatusCode] = {}
        async with dial(router.admin.endpoint) as channel:
            for method in (
                "externalscaler.ExternalScaler/IsActive",
                "externalscaler.ExternalScaler/GetMetricSpec",
                "slipstream.v1.AutoscaleService/GetRecommendations",
                "slipstream.v1.WorkerService/GetStatus",
                "slipstream.v1.WorkerService/Drain",
            ):
                begin: Any = channel.unary_unary(f"/{method}")
                call = begin(of("router").SerializeToString(), timeout=WAIT_S)
                statuses[method.rpartition("/")[2]] = await call.code()
    opened = {"IsActive", "GetMetricSpec"} if is_public else set()
    assert statuses == {
        name: grpc.StatusCode.OK if name in opened else grpc.StatusCode.UNAUTHENTICATED for name in statuses
    }

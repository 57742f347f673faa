"""AutoscaleService of a running router: reasons, and what the removal of each worker would lose."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from libs.common.cluster.discovery import InMemoryDiscovery
from libs.common.cluster.placement_record import Placement, SessionId
from libs.common.cluster.worker_record import Role
from services.router.admission.types import AdmissionRequest
from services.router.autoscale.decision import recommend_all
from services.router.autoscale.types import Aims, AutoscalePolicy
from services.router.request.model_card import ModelCard
from slipstream.enum_names import ROLES, value_name
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import dial
from slipstream.v1 import autoscale_pb2, autoscale_pb2_grpc
from tests.router.autoscale.test_scaler import ReportedTier, running_router
from tests.router.conftest import WAIT_S, eventually

SECRET = ClusterSecret(b"a secret of this test, 32 bytes!")


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


async def test_the_answer_explains_each_tier_and_ranks_the_workers(card: ModelCard) -> None:
    discovery = InMemoryDiscovery()
    tier = ReportedTier(discovery)
    await tier.resize(3)
    async with running_router(card, discovery) as router:
        tier.report(busy_share=0.9)
        await tier.wait_seen(router)
        keys = [link.key for link in router.fleet.links_of(Role.PREFILL)]
        # prefill-0 has unique KV, prefill-1 a session, prefill-2 only what prefill-0 has too.
        router.fleet.index.view(keys[0]).stored(1, [key(number) for number in range(10)])
        router.fleet.index.view(keys[2]).stored(1, [key(number) for number in range(4)])
        router.manager.context.sessions._placements.put(
            SessionId("anna", "s1"), Placement(prefill="prefill-1", block_count=32, tail_hash=key(0))
        )
        async with dial(router.admin.endpoint) as channel:
            stub: autoscale_pb2_grpc.AutoscaleServiceAsyncStub = autoscale_pb2_grpc.AutoscaleServiceStub(
                channel
            )
            answer = await stub.GetRecommendations(autoscale_pb2.GetRecommendationsRequest(), timeout=WAIT_S)
    tiers = {ROLES.name(row.role): row for row in answer.tiers}
    assert (tiers["prefill"].replicas, tiers["prefill"].wanted_replicas) == (3, 4)
    assert tiers["prefill"].signal == autoscale_pb2.AUTOSCALE_SIGNAL_BUSY_SHARE
    assert "aim 0.75" in tiers["prefill"].reason
    assert tiers["router"].replicas == 1
    prefills = [row for row in answer.losses if ROLES.name(row.role) == "prefill"]
    assert [(row.instance, row.unique_blocks, row.sessions, row.deletion_cost) for row in prefills] == [
        ("prefill-2", 0, 0, 0),
        ("prefill-1", 0, 1, 3),
        ("prefill-0", 6, 0, 11),
    ]
    assert prefills[0].endpoint == tier.workers[2].host.endpoint
    for worker in tier.workers:
        await worker.stop()


def test_every_aim_is_a_signal_of_the_contract() -> None:
    aims = {field.name for field in dataclasses.fields(Aims)}
    numbers = filter(None, autoscale_pb2.AutoscaleSignal.values())
    assert {value_name(autoscale_pb2.AutoscaleSignal, number) for number in numbers} == {"load", *aims}


async def test_a_router_is_named_by_the_address_that_others_dial(card: ModelCard) -> None:
    ports: dict[str, Any] = {"admin": "0.0.0.0:0", "advertise": "127.0.0.1:7000", "secret": SECRET}
    async with running_router(card, InMemoryDiscovery(), **ports) as router:
        port = router.admin.endpoint.rpartition(":")[2]
        assert [held.endpoint for held in await router.signals.holdings()] == [f"127.0.0.1:{port}"]


async def test_processes_at_one_address_are_one_router(card: ModelCard) -> None:
    discovery = InMemoryDiscovery()
    shared = {"advertise": "127.0.0.1:7000"}
    async with (
        running_router(card, discovery, "router-0", **shared) as router,
        running_router(card, discovery, "router-0.1", **shared),
        running_router(card, discovery, "router-1"),
    ):
        await eventually(lambda: len(router.signals.loads()) == 3)
        async with dial(router.admin.endpoint) as channel:
            stub: autoscale_pb2_grpc.AutoscaleServiceAsyncStub = autoscale_pb2_grpc.AutoscaleServiceStub(
                channel
            )
            answer = await stub.GetRecommendations(autoscale_pb2.GetRecommendationsRequest(), timeout=WAIT_S)
    assert [row.replicas for row in answer.tiers if ROLES.name(row.role) == "router"] == [2]
    # Each process holds other requests.
    assert {row.instance for row in answer.losses} == {"router-0", "router-0.1", "router-1"}


async def test_the_sessions_of_all_tenants_are_counted_off_the_event_loop(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_router(card, InMemoryDiscovery()) as router:
        counted_by: list[int] = []

        def sessions() -> dict[SessionId, Placement]:
            counted_by.append(threading.get_ident())
            return {}

        monkeypatch.setattr(router.signals, "_sessions", sessions)
        await router.signals.holdings()
        assert counted_by and threading.get_ident() not in counted_by


async def test_a_router_at_its_own_limit_reports_no_wait_for_workers(card: ModelCard) -> None:
    async with running_router(card, InMemoryDiscovery(), max_requests=2) as router:
        gate = router.manager.gate
        tickets = [
            gate.offer(AdmissionRequest(f"k{n}", "t", prefill_tokens=100), on_preempt=lambda: None)
            for n in range(5)
        ]
        report = router.load()
        found = {row.role: row for row in recommend_all(router.signals.loads(), AutoscalePolicy())}
        for ticket in tickets:
            ticket.end()
    # None has a worker yet: those that take places count as waiting, and for the routers' share all the same.
    assert (report.requests_admitted, report.requests_allowed) == (2, 2)
    assert report.requests_running + report.requests_waiting == 5
    assert (report.requests_waiting_decode, report.prefill_tokens_in_flight) == (0, 0)
    assert found[Role.ROUTER].load >= 1.25, "its own share, or that of its event loop, which has just begun"

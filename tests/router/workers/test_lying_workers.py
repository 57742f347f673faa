"""Workers that report false figures, or send what is no message: requests go on, and so does autoscaling."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import grpc
import pytest

from libs.common.cluster.discovery import Fleet, InMemoryDiscovery
from libs.common.cluster.worker_record import Role, Worker
from services.router.request.model_card import ModelCard
from services.router.workers import connection, router_peers
from services.router.workers.connection import WorkerConnection
from services.router.workers.router_peers import RouterPeers
from slipstream.async_client import AsyncClient
from slipstream.enum_names import ROLES
from slipstream.rpc.dial import PLAIN_DIAL, dial
from slipstream.rpc.rpc_errors import received
from slipstream.v1 import autoscale_pb2, autoscale_pb2_grpc, worker_pb2
from tests.router.conftest import HELLO, WAIT_S, eventually, open_router
from tests.router.support.connection_owner import AnyWorker
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_workers import FakeWorker

_GARBAGE = b"\xff\xff\xff"
_DOUBLES = [field.name for field in worker_pb2.LoadReport.DESCRIPTOR.fields if field.type == 1]
_COUNTS = ("requests_running", "requests_waiting", "handoffs")
_AMOUNTS = ("prefill_tokens_in_flight", "decode_tokens_in_flight", "blocks_free", "blocks_held")


def lie(worker: FakeWorker, figure: float, *, count: int = 1, amount: int = 1) -> None:
    """Let the worker report these figures from now on."""
    figures: dict[str, Any] = dict.fromkeys(_DOUBLES, figure)
    counts: dict[str, Any] = dict.fromkeys(_COUNTS, count) | dict.fromkeys(_AMOUNTS, amount)
    worker.process.stated_load = worker_pb2.LoadReport(**figures, **counts)
    worker.service.load_changed()


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf, -1e308, 1e308, 5e-324])
async def test_no_figure_of_one_worker_of_each_tier_stops_requests_or_recommendations(
    cluster: FakeCluster, card: ModelCard, figure: float
) -> None:
    """The liars are the first of their tiers, so that each comparison meets them first."""
    for worker in (cluster.prefills[0], cluster.decodes[0], cluster.kvstore):
        lie(worker, figure, count=(1 << 32) - 1, amount=(1 << 64) - 1)
    async with open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        for seed in range(4):
            assert (await client.chat(HELLO, seed=seed)).text
        async with dial(router.admin.endpoint) as channel:
            stub: autoscale_pb2_grpc.AutoscaleServiceAsyncStub = autoscale_pb2_grpc.AutoscaleServiceStub(
                channel
            )
            answer = await stub.GetRecommendations(autoscale_pb2.GetRecommendationsRequest(), timeout=WAIT_S)
        assert len(answer.tiers) == len(Role)
        assert all(math.isfinite(tier.value) and tier.wanted_replicas <= 64 for tier in answer.tiers)
        assert {loss.instance for loss in answer.losses} >= {"prefill-0", "decode-0", "kvstore-0"}


class GarbageWorker(grpc.GenericRpcHandler):
    """A decode worker whose first answers to each method are bytes that are no message."""

    def __init__(self, worker: Worker) -> None:
        self._status = worker_pb2.GetStatusResponse(
            role=ROLES.value(worker.role),
            instance=worker.instance,
            incarnation=worker.incarnation,
        )
        self.answers = {"GetStatus": 0, "WatchLoad": 0}  # so far

    def service(self, handler_call_details: Any) -> Any:
        name = handler_call_details.method.rpartition("/")[2]
        if name == "GetStatus":
            return grpc.unary_unary_rpc_method_handler(self._get_status)
        return grpc.unary_stream_rpc_method_handler(self._watch_load) if name == "WatchLoad" else None

    async def _get_status(self, *_: Any) -> bytes:
        return self._next("GetStatus", self._status.SerializeToString())

    async def _watch_load(self, *_: Any) -> AsyncIterator[bytes]:
        load = worker_pb2.LoadReport(sequence=1, requests_running=7)
        yield self._next("WatchLoad", worker_pb2.WatchLoadResponse(load=load).SerializeToString())
        await asyncio.Event().wait()

    def _next(self, name: str, message: bytes) -> bytes:
        self.answers[name] += 1
        return _GARBAGE if self.answers[name] <= 2 else message


@asynccontextmanager
async def serving(handler: grpc.GenericRpcHandler) -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_worker_that_sent_no_message_is_asked_again() -> None:
    """gRPC gives None for it, and no error: the task that follows the worker must not end by it."""
    named = Worker(Role.DECODE, "decode-0", "127.0.0.1:1", "run-1")
    handler = GarbageWorker(named)
    async with serving(handler) as endpoint:
        link = WorkerConnection(
            replace(named, endpoint=endpoint), AnyWorker(), clock=asyncio.get_running_loop().time
        )
        try:
            await eventually(lambda: link.ready)
            assert link.load()[2] == 7
            assert handler.answers["WatchLoad"] == 3
        finally:
            await link.close()


async def test_a_router_that_sent_no_message_is_asked_again() -> None:
    named = Worker(Role.ROUTER, "router-1", "127.0.0.1:1", "run-1")
    discovery = InMemoryDiscovery()
    async with serving(GarbageWorker(named)) as endpoint, Fleet(discovery) as members:
        discovery.announce(replace(named, admin=endpoint))
        clock = asyncio.get_running_loop().time
        peers = RouterPeers(members, own="router-0", dial=PLAIN_DIAL, clock=clock)
        peers.start()
        try:
            await eventually(lambda: any(peers.reports().values()))
        finally:
            await peers.close()


async def test_a_router_follows_a_bounded_number_of_other_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_peers, "MAX_FOLLOWED_ROUTERS", 3)
    discovery = InMemoryDiscovery()
    for number in range(10):
        discovery.announce(Worker(Role.ROUTER, f"router-{number}", "127.0.0.1:1", "i", admin="127.0.0.1:1"))
    async with Fleet(discovery) as members:
        await members.wait_snapshot()
        peers = RouterPeers(members, own="router-0", dial=PLAIN_DIAL, clock=asyncio.get_running_loop().time)
        peers.start()
        try:
            await eventually(lambda: len(peers.workers()) == 3)
            discovery.announce(Worker(Role.ROUTER, "router-a", "127.0.0.1:1", "i", admin="127.0.0.1:1"))
            await members.wait_until(lambda fleet: len(fleet.workers) == 11, timeout_s=WAIT_S)
            await asyncio.sleep(0)
            assert len(peers.workers()) == 3
        finally:
            await peers.close()


class FloodingWorker(GarbageWorker):
    """Sends load reports as fast as the connection takes them."""

    def __init__(self, worker: Worker, *, counts: bool = True) -> None:
        """`counts`: each report has the next number; else all have the same one."""
        super().__init__(worker)
        self.answers["GetStatus"] = 2
        self._counts = counts
        self._sequence = 1

    async def _watch_load(self, *_: Any) -> AsyncIterator[bytes]:
        while True:
            self._sequence += self._counts
            load = worker_pb2.LoadReport(sequence=self._sequence)
            yield worker_pb2.WatchLoadResponse(load=load).SerializeToString()


class CountedReads:
    """Counts the responses that a module of the router takes from other processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.n = 0
        monkeypatch.setattr(module, "received", self._received)

    def _received(self, response: Any, *, sender: str) -> Any:
        self.n += 1
        return received(response, sender=sender)

    async def check_pace(self) -> None:
        clock = asyncio.get_running_loop().time
        began_s, first = clock(), self.n
        await asyncio.sleep(0.5)
        await eventually(lambda: self.n > first + 1)
        assert self.n - first <= 2 + 2 * (clock() - began_s) / connection.LEAST_GAP_S


@pytest.mark.parametrize("counts", [True, False])
async def test_a_worker_that_floods_is_read_at_a_pace(monkeypatch: pytest.MonkeyPatch, counts: bool) -> None:
    named = Worker(Role.DECODE, "decode-0", "127.0.0.1:1", "run-1")
    owner, clock = AnyWorker(), asyncio.get_running_loop().time
    reads = CountedReads(monkeypatch, connection)
    async with serving(FloodingWorker(named, counts=counts)) as endpoint:
        link = WorkerConnection(replace(named, endpoint=endpoint), owner, clock=clock)
        try:
            await eventually(lambda: link.ready)
            await reads.check_pace()
        finally:
            await link.close()


async def test_a_router_that_floods_is_read_at_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    named = Worker(Role.ROUTER, "router-1", "127.0.0.1:1", "run-1")
    discovery, clock = InMemoryDiscovery(), asyncio.get_running_loop().time
    reads = CountedReads(monkeypatch, router_peers)
    async with serving(FloodingWorker(named)) as endpoint, Fleet(discovery) as members:
        discovery.announce(replace(named, admin=endpoint))
        peers = RouterPeers(members, own="router-0", dial=PLAIN_DIAL, clock=clock)
        peers.start()
        try:
            await eventually(lambda: any(peers.reports().values()))
            await reads.check_pace()
        finally:
            await peers.close()

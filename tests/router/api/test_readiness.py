"""Readiness and draining: HTTP, gRPC's health service and admission say the same."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.common.cluster.worker_record import Worker
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.rpc.dial import dial
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from tests.router.conftest import HELLO, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel

CHAT = "/v1/chat/completions"
BODY = {"messages": HELLO, "max_tokens": 12, "ignore_eos": True}
SERVICES = ("", "readiness", "slipstream.v1.RouterService")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def grpc_health(router: RouterServer) -> list[int]:
    """What the health service says of each of SERVICES, and of liveness."""
    async with dial(router.host.endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        names = (*SERVICES, "liveness")
        asked = [stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60) for name in names]
        return [answer.status for answer in await asyncio.gather(*asked)]


async def http_health(router: RouterServer) -> tuple[int, str, str | None]:
    """Status, state and Retry-After of the readiness page."""
    url = f"http://{router.http_endpoint}/healthz/ready"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        return answer.status, (await answer.json())["status"], answer.headers.get("Retry-After")


def hold(cluster: FakeCluster) -> None:
    """Answers begin, and go on after `release`."""
    for worker in cluster.decodes:
        worker.gate.clear()


def release(cluster: FakeCluster) -> None:
    for worker in cluster.decodes:
        worker.gate.set()


async def test_a_router_without_prefill_workers_is_degraded_and_serves(
    model: FakeModel, card: ModelCard
) -> None:
    async with FakeCluster(model, prefills=0) as cluster, open_router(cluster, card) as router:
        assert await http_health(router) == (200, "degraded", None)
        assert await grpc_health(router) == [SERVING] * 4
        url = f"http://{router.http_endpoint}{CHAT}"
        async with aiohttp.ClientSession() as http, http.post(url, json=BODY) as answer:
            assert answer.status == 200
            assert (await answer.json())["usage"]["completion_tokens"] == 12


async def test_a_router_without_decode_workers_is_not_ready_and_says_when_to_return(
    model: FakeModel, card: ModelCard
) -> None:
    async with FakeCluster(model, decodes=0) as cluster, open_router(cluster, card) as router:
        assert await http_health(router) == (503, "waiting", "1")
        assert await grpc_health(router) == [NOT_SERVING] * 3 + [SERVING]
        url = f"http://{router.http_endpoint}{CHAT}"
        async with aiohttp.ClientSession() as http, http.post(url, json=BODY) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        await cluster.add_decode("decode-0").start()
        await eventually(lambda: router.fleet.can_serve)
        assert await http_health(router) == (200, "ready", None)


async def test_a_drain_rpc_is_seen_at_once_by_all(
    router: RouterServer, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd_is_unavailable = asyncio.Event()
    withdraw = cluster.discovery.withdraw

    async def withdraw_late(worker: Worker) -> None:
        await etcd_is_unavailable.wait()
        await withdraw(worker)

    monkeypatch.setattr(cluster.discovery, "withdraw", withdraw_late)
    assert await http_health(router) == (200, "ready", None)
    assert await grpc_health(router) == [SERVING] * 4
    assert router.metrics.snapshot()["slipstream_draining"] == 0
    async with dial(router.admin.endpoint) as channel:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        drained = asyncio.ensure_future(stub.Drain(worker_pb2.DrainRequest(), timeout=60))
        try:
            await eventually(lambda: router.manager.draining)
            assert await http_health(router) == (503, "draining", "1")
            assert await grpc_health(router) == [NOT_SERVING] * 3 + [SERVING]
            assert router.metrics.snapshot()["slipstream_draining"] == 1
        finally:
            etcd_is_unavailable.set()
            await drained


async def test_a_stop_lets_streams_end_and_refuses_new_requests(
    cluster: FakeCluster, card: ModelCard
) -> None:
    hold(cluster)
    url = ""
    async with aiohttp.ClientSession() as http, open_router(cluster, card) as router:
        url = f"http://{router.http_endpoint}"
        async with http.post(f"{url}{CHAT}", json={**BODY, "stream": True}) as stream:
            first = await stream.content.readline()
            stopping = asyncio.create_task(router.stop(grace_s=1000))
            await eventually(lambda: router.manager.draining)
            assert await http_health(router) == (503, "draining", "1")
            assert (await grpc_health(router))[:3] == [NOT_SERVING] * 3
            async with http.post(f"{url}{CHAT}", json=BODY) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
                assert refused.headers["Connection"] == "close"
                assert (await refused.json())["error"]["type"] == "server_error"
            async with AsyncClient(router.host.endpoint, resume_within_s=0, max_retries=0) as client:
                with pytest.raises(errors.Unavailable):
                    await client.chat(HELLO)
            assert not stopping.done()
            release(cluster)
            rest = await stream.content.read()
            assert first.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")
            async with asyncio.timeout(100):  # it does not wait for the rest of the 1000 s
                await stopping


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event(
    cluster: FakeCluster, card: ModelCard
) -> None:
    hold(cluster)
    async with (
        aiohttp.ClientSession() as http,
        open_router(cluster, card) as router,
        http.post(f"http://{router.http_endpoint}{CHAT}", json={**BODY, "stream": True}) as stream,
    ):
        await stream.content.readline()
        stopping = asyncio.create_task(router.stop(grace_s=0.1))
        events = (await stream.content.read()).split(b"\n\n")  # raises where the last chunk is missing
        last = json.loads(events[-2].removeprefix(b"data: "))
        assert last["error"] == {
            "message": "the router is stopping",
            "type": "server_error",
            "param": None,
            "code": None,
        }
        await stopping


async def test_an_idle_router_stops_without_waiting(router: RouterServer) -> None:
    async with asyncio.timeout(100):
        await router.stop(grace_s=1000)


async def test_health_of_an_unknown_service_is_not_found(router: RouterServer) -> None:
    async with dial(router.host.endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(health_pb2.HealthCheckRequest(service="slipstream.v1.Nothing"), timeout=60)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND

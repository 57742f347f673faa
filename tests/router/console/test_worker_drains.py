"""Operators drain workers by the console, and get those back that have left discovery."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import pytest

from libs.common.cluster.discovery import Fleet, InMemoryDiscovery
from libs.common.cluster.worker_record import Role, Worker
from libs.common.cluster.worker_service import WorkerIdentity, WorkerService
from libs.common.rpc.access import AccessControl
from libs.common.rpc.serve import ServiceHost
from services.router.console.worker_drains import WorkerDrains
from services.router.operators.process_calls import ProcessCalls
from services.router.server import RouterServer
from slipstream.errors import InvalidArgument, NotFound, PermissionDenied
from slipstream.rpc.caller_class import CallerClass, CallerIdentity
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import Dial
from slipstream.rpc.peer_token import TokenMinter
from slipstream.v1 import worker_pb2_grpc
from tests.router.conftest import eventually
from tests.router.support.fake_cluster import FakeCluster
from tests.support.stubs.idle_process import IdleProcess

SECRET = ClusterSecret(b"the secret of this cluster")
POST = {"x-slipstream-console": "1"}
ANNA = CallerIdentity(CallerClass.OPERATOR, "anna-laptop")


async def row_of(http: aiohttp.ClientSession, instance: str) -> dict[str, Any] | None:
    async with http.get("/console/api/fleet") as answer:
        rows = (await answer.json())["workers"]
    return next((row for row in rows if row["instance"] == instance), None)


async def test_a_drained_worker_stays_in_sight_until_it_is_undrained_or_gone(
    router: RouterServer, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.console.worker_statuses.ASK_EVERY_S", 0.0)
    worker = cluster.decodes[1]
    async with aiohttp.ClientSession(f"http://{router.admin_http_endpoint}") as http:
        path = "/console/api/workers/decode/decode-1"
        async with http.post(f"{path}/drain", json={}, headers=POST) as answer:
            assert (answer.status, await answer.json()) == (200, {"draining": True})
        assert worker.service.draining
        await cluster.discovery.withdraw(worker.worker)  # as a real worker does
        await eventually(lambda: "decode-1" not in {link.worker.instance for link in router.fleet.links()})
        row = await row_of(http, "decode-1")
        assert row is not None and row["draining"] and not row["ready"]
        async with http.post(f"{path}/undrain", json={}, headers=POST) as answer:
            assert (answer.status, await answer.json()) == (200, {"draining": False})
        assert not worker.service.draining
        await worker.kill()
        async with asyncio.timeout(60):
            while await row_of(http, "decode-1") is not None:
                await asyncio.sleep(0.01)
        async with http.post(f"{path}/undrain", json={}, headers=POST) as answer:
            assert answer.status == 503


async def test_workers_drain_for_the_operator_who_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = ServiceHost("127.0.0.1:0", access=AccessControl(secret=SECRET))
    identity = WorkerIdentity(Role.PREFILL, "prefill-0")
    service = WorkerService(identity, IdleProcess())
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, host.server)
    await host.start(["slipstream.v1.WorkerService"])
    discovery = InMemoryDiscovery()
    discovery.announce(Worker(Role.PREFILL, "prefill-0", host.endpoint, identity.incarnation))
    async with Fleet(discovery) as members:
        await members.wait_snapshot()
        as_router = Dial(None, TokenMinter(SECRET, "router-0"))
        drains = WorkerDrains(members, ProcessCalls(as_router, SECRET))
        with caplog.at_level(logging.WARNING):
            assert await drains.set_draining("prefill", "prefill-0", draining=True, caller=ANNA, peer="::1")
        assert service.draining
        assert "prefill/prefill-0 is drained from the console by operator anna-laptop at ::1" in caplog.text
        assert "prefill-0 is drained by operator anna-laptop" in caplog.text  # in the worker's log
        as_peer = WorkerDrains(members, ProcessCalls(as_router, None))
        with pytest.raises(PermissionDenied):
            await as_peer.set_draining("prefill", "prefill-0", draining=False, caller=ANNA, peer="")
        for role, instance, error in (
            ("router", "router-0", InvalidArgument),
            ("decode", "prefill-0", NotFound),
            ("prefill", "prefill-9", NotFound),
        ):
            with pytest.raises(error):
                await drains.set_draining(role, instance, draining=True, caller=ANNA, peer="")
    await host.stop(grace_s=0)

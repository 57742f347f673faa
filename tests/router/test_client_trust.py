"""With mTLS clients and peers have different trust, and certificates distinguish operators and peers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.common.cluster.worker_service import WorkerIdentity, WorkerService
from libs.common.rpc.serve import ServiceHost
from services.router.request.model_card import ModelCard
from slipstream.async_client import AsyncClient
from slipstream.credentials.certificates import validity_unix_s
from slipstream.rpc.dial import dial
from slipstream.rpc.tls import TlsFiles
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from tests.router.conftest import open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel
from tests.support.stubs.idle_process import IdleProcess

PEMS = Path(__file__).parents[1] / "support" / "tls"
PEERS = TlsFiles(PEMS / "ca.pem", PEMS / "peer.pem", PEMS / "peer.key")
# Signed by another CA; its common name is an operator's. It trusts the CA of the peers' certificates.
CLIENT = TlsFiles(PEMS / "ca.pem", PEMS / "client.pem", PEMS / "client.key")
OF_CLIENTS = replace(PEERS, ca=PEMS / "client-ca.pem")


async def drain_code(endpoint: str, tls: TlsFiles, method: str = "Drain") -> grpc.StatusCode:
    async with dial(endpoint, tls=tls) as channel:
        request = getattr(worker_pb2, f"{method}Request")()
        call: Any = getattr(worker_pb2_grpc.WorkerServiceStub(channel), method)(request, timeout=60)
        code: grpc.StatusCode = await call.code()
        return code


async def test_a_clients_certificate_opens_the_public_port_only(model: FakeModel, card: ModelCard) -> None:
    async with (
        FakeCluster(model, tls=PEERS) as cluster,
        open_router(cluster, card, tls=PEERS, client_tls=OF_CLIENTS) as router,
    ):
        async with AsyncClient(router.host.endpoint, tls=CLIENT) as client:
            assert (await client.chat([{"role": "user", "content": "hi"}])).finish_reason == "stop"
        for endpoint in (router.admin.endpoint, cluster.decodes[0].host.endpoint):
            assert await drain_code(endpoint, CLIENT, "GetStatus") is grpc.StatusCode.UNAVAILABLE
            assert await drain_code(endpoint, PEERS, "GetStatus") is grpc.StatusCode.OK
        assert await drain_code(router.host.endpoint, PEERS, "GetStatus") is grpc.StatusCode.UNAVAILABLE
        ends = router.metrics.snapshot()["slipstream_certificate_expires_unix_seconds"]
        assert ends == validity_unix_s(PEERS.certificate.read_text())[1]


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({}, False),
        ({"tls": PEERS, "client_tls": OF_CLIENTS}, False),
        ({"tls": PEERS}, True),
        ({"tls": PEERS, "client_tls": PEERS}, True),  # as without --tls-client-ca
    ],
)
async def test_a_router_whose_clients_are_trusted_as_peers_warns(
    options: dict[str, TlsFiles],
    warns: bool,
    model: FakeModel,
    card: ModelCard,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        FakeCluster(model, tls=PEERS if options else None) as cluster,
        open_router(cluster, card, **options),
    ):
        said = [record for record in caplog.records if "--tls-client-ca" in record.message]
        assert [record.levelname for record in said] == ["WARNING"] * warns


async def test_a_certificate_with_an_operators_name_may_drain() -> None:
    for tls, client, expected in (
        (PEERS, PEERS, grpc.StatusCode.PERMISSION_DENIED),
        (OF_CLIENTS, CLIENT, grpc.StatusCode.OK),
    ):
        host = ServiceHost("127.0.0.1:0", tls=tls)
        service = WorkerService(WorkerIdentity("decode", "decode-0"), IdleProcess())
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, host.server)
        await host.start(["slipstream.v1.WorkerService"])
        try:
            assert await drain_code(host.endpoint, client) is expected
            assert await drain_code(host.endpoint, client, "GetStatus") is grpc.StatusCode.OK
            assert service.draining == (expected is grpc.StatusCode.OK)
        finally:
            await host.stop(grace_s=0)

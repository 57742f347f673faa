"""Whether a process is ready, asked from outside."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.rpc.dial import dial
from slipstream.rpc.tls import TlsFiles

READINESS = "readiness"
_ASK_S = 1.0
_INTERVAL_S = 0.1


async def until_grpc_ready(endpoint: str, *, tls: TlsFiles | None = None) -> None:
    """Return when the health service at `endpoint` says that "readiness" is SERVING. Waits for ever."""
    while True:
        # A new channel each time: one that failed to connect would sit out a back-off.
        async with dial(endpoint, tls=tls) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=READINESS), timeout=_ASK_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass
        await asyncio.sleep(_INTERVAL_S)


async def until_etcd_ready(endpoint: str) -> None:
    """Return when the etcd at `endpoint` (plain HTTP) says that it is healthy. Waits for ever."""

    while b"true" not in await asyncio.to_thread(_health, endpoint):
        await asyncio.sleep(_INTERVAL_S)


async def until_pool_ready(endpoint: str) -> None:
    """Return when the pool master whose HTTP server is at `endpoint` leads or stands by. Waits for ever."""

    def settled() -> bool:
        try:
            said = json.loads(_health(endpoint) or b"{}")
        except ValueError:
            return False
        if not isinstance(said, dict):
            return False
        return said.get("service_ready") is True or said.get("role") == "standby"

    while not await asyncio.to_thread(settled):
        await asyncio.sleep(_INTERVAL_S)


def _health(endpoint: str) -> bytes:
    """The body of GET /health, empty without an answer."""
    try:
        with urllib.request.urlopen(f"http://{endpoint}/health", timeout=_ASK_S) as response:
            return bytes(response.read(1024))
    except (OSError, http.client.HTTPException):
        return b""

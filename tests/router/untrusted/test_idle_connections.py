"""The router closes idle gRPC connections: a call that begins at that moment succeeds, by whatever client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from services.router import ports
from services.router.request.model_card import ModelCard
from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import HELLO, open_router
from tests.router.support.fake_cluster import FakeCluster

_CALLS = 24
MakeCalls = Callable[[str, float], Awaitable[None]]


class HastyRouters:
    """Routers that close idle connections at once."""

    def __init__(self, cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cluster, self._card, self._patch = cluster, card, monkeypatch

    async def check(self, make_calls: MakeCalls) -> None:
        """Calls to a router by its endpoint, with its idle time.

        A call whose retry meets another close fails: the time grows until it is long beside the delays of a
        loaded machine.
        """
        for idle_s in (0.25, 1.0, 3.0):
            try:
                n_connections = await self._connections_of(make_calls, idle_s)
            except (errors.Unavailable, grpc.aio.AioRpcError):
                if idle_s == 3.0:
                    raise
                continue
            assert n_connections > _CALLS // 4  # they did close
            return

    async def _connections_of(
        self, make_calls: Callable[[str, float], Awaitable[None]], idle_s: float
    ) -> int:
        self._patch.setattr(ports, "GRPC_IDLE_CONNECTION_S", idle_s)
        async with open_router(self._cluster, self._card) as router:
            connections: set[str] = set()
            name_call = router._grpc.name_call

            def note(context: Any) -> None:
                connections.add(context.peer())
                name_call(context)

            router._grpc.name_call = note  # type: ignore[method-assign]
            await make_calls(router.host.endpoint, idle_s)
            return len(connections)


@pytest.fixture
def routers(cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> HastyRouters:
    return HastyRouters(cluster, card, monkeypatch)


async def sweep(call: Callable[[], Awaitable[object]], idle_s: float) -> None:
    """Make calls whose pauses sweep over one to two idle times, in which the close comes."""
    for step in range(_CALLS):
        await call()
        await asyncio.sleep((0.9 + 1.3 * step / _CALLS) * idle_s)


async def test_the_sdk_does_not_fail(routers: HastyRouters) -> None:
    async def make_calls(endpoint: str, idle_s: float) -> None:
        async with AsyncClient(endpoint) as client:
            await sweep(client.models, idle_s)
            await sweep(lambda: client.chat(HELLO, max_tokens=1), idle_s)

    await routers.check(make_calls)


async def test_a_plain_client_does_not_fail(routers: HastyRouters) -> None:
    async def make_calls(endpoint: str, idle_s: float) -> None:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            stub: Any = router_pb2_grpc.RouterServiceStub(channel)
            await sweep(lambda: stub.ListModels(router_pb2.ListModelsRequest(), timeout=60), idle_s)

    await routers.check(make_calls)

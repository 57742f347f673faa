"""The router closes idle gRPC connections: a call that begins at that moment succeeds, by whatever client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from services.router import ports
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import HELLO, open_router
from tests.router.support.fake_cluster import FakeCluster

# A call whose retry meets another close fails: the time is long beside the delays of a loaded machine.
_IDLE_S = 0.25
_CALLS = 24


@pytest.fixture
async def hasty_router(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[RouterServer, set[str]]]:
    """A router that closes idle connections at once, and the connections that it had."""
    monkeypatch.setattr(ports, "GRPC_IDLE_CONNECTION_S", _IDLE_S)
    async with open_router(cluster, card) as router:
        connections: set[str] = set()
        name_call = router._grpc.name_call

        def note(context: Any) -> None:
            connections.add(context.peer())
            name_call(context)

        router._grpc.name_call = note  # type: ignore[method-assign]
        yield router, connections


async def sweep(call: Callable[[], Awaitable[object]]) -> None:
    """Make calls whose pauses sweep over one to two idle times, in which the close comes."""
    for step in range(_CALLS):
        await call()
        await asyncio.sleep((0.9 + 1.3 * step / _CALLS) * _IDLE_S)


async def test_the_sdk_does_not_fail(hasty_router: tuple[RouterServer, set[str]]) -> None:
    router, connections = hasty_router
    async with AsyncClient(router.host.endpoint) as client:
        await sweep(client.models)
        await sweep(lambda: client.chat(HELLO, max_tokens=1))
    assert len(connections) > _CALLS // 4  # they did close


async def test_a_plain_client_does_not_fail(hasty_router: tuple[RouterServer, set[str]]) -> None:
    router, connections = hasty_router
    async with grpc.aio.insecure_channel(router.host.endpoint) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        await sweep(lambda: stub.ListModels(router_pb2.ListModelsRequest(), timeout=60))
    assert len(connections) > _CALLS // 4

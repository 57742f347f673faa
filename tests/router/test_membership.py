"""A router that drains hands its streams over to another one; without another one they end where they run."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.router import membership
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from tests.router.conftest import HELLO, WAIT_S, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "HAND_OVER_AFTER_S", 0.01)


class HeldStream:
    """A stream of the first router that has begun. Its rest waits for `finish`."""

    def __init__(self, cluster: FakeCluster, *routers: RouterServer) -> None:
        self._cluster = cluster
        self._routers = [router.host.endpoint for router in routers]
        self.endpoint = self._routers[0]

    async def __aenter__(self) -> HeldStream:
        for decode in self._cluster.decodes:
            decode.gate.clear()
        self._client = AsyncClient(self._routers, resume_within_s=WAIT_S)
        self._stream = self._client.stream_chat(HELLO, request_id="r-1")
        self._events = aiter(self._stream)
        while not self._stream.reply.text:
            await anext(self._events)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._let_go()
        await self._client.close()

    async def finish(self) -> str:
        """Its whole text. `endpoint` is then the router that ended it."""
        self._let_go()
        async for _ in self._events:
            pass
        self.endpoint = self._stream.endpoint
        return self._stream.reply.text

    def _let_go(self) -> None:
        for decode in self._cluster.decodes:
            decode.gate.set()


class Asked:
    """Counts how often a router asks for a successor from now on."""

    def __init__(self, router: RouterServer) -> None:
        self.times = 0
        self._ask = router.pipeline.peers.has_successor
        vars(router.pipeline.peers)["has_successor"] = self

    def __call__(self) -> bool:
        self.times += 1
        return self._ask()


def sees(router: RouterServer, *, draining: bool) -> bool:
    """Whether the router has a report of another one in this state."""
    reports = router.pipeline.peers.reports().values()
    return any(report is not None and report.draining == draining for report in reports)


@pytest.fixture
async def pair(cluster: FakeCluster, card: ModelCard) -> AsyncIterator[tuple[RouterServer, RouterServer]]:
    async with open_router(cluster, card) as one, open_router(cluster, card, instance="router-1") as two:
        await eventually(lambda: sees(one, draining=False))
        yield one, two


async def whole_text(router: RouterServer) -> str:
    async with AsyncClient(router.host.endpoint) as client:
        return (await client.chat(HELLO, request_id="r-1")).text


async def test_a_lone_router_ends_its_streams_itself(router: RouterServer, cluster: FakeCluster) -> None:
    whole, asked = await whole_text(router), Asked(router)
    async with HeldStream(cluster, router) as stream:
        await router._membership.drain()
        await eventually(lambda: asked.times > 3)
        assert router.manager.draining and router.manager.held
        assert await stream.finish() == whole


async def test_streams_move_to_another_router(
    cluster: FakeCluster, pair: tuple[RouterServer, RouterServer]
) -> None:
    one, two = pair
    whole = await whole_text(one)
    async with HeldStream(cluster, one, two) as stream:
        await one._membership.drain()
        await eventually(lambda: not one.manager.held)
        assert await stream.finish() == whole
        assert stream.endpoint == two.host.endpoint


async def test_a_router_that_drains_too_takes_no_streams(
    cluster: FakeCluster, pair: tuple[RouterServer, RouterServer]
) -> None:
    one, two = pair
    whole, asked = await whole_text(one), Asked(one)
    await two._worker_service.drain()
    two._membership.join()  # as a router whose record has not left discovery yet
    await eventually(lambda: sees(one, draining=True))
    async with HeldStream(cluster, one, two) as stream:
        await one._membership.drain()
        await eventually(lambda: asked.times > 3)
        assert one.manager.held
        assert await stream.finish() == whole
        assert stream.endpoint == one.host.endpoint


async def test_a_router_without_workers_takes_no_streams(
    cluster: FakeCluster, pair: tuple[RouterServer, RouterServer]
) -> None:
    """It does not drain, and would refuse each of them."""
    one, two = pair
    whole, asked = await whole_text(one), Asked(one)
    links, two.fleet._links = two.fleet._links, {}  # as one whose discovery names no workers
    two.fleet.readiness_changed()
    await eventually(lambda: not one.pipeline.peers.has_successor())
    assert sees(one, draining=False)
    async with HeldStream(cluster, one, two) as stream:
        await one._membership.drain()
        await eventually(lambda: asked.times > 3)
        assert one.manager.held
        two.fleet._links = links
        two.fleet.readiness_changed()
        await eventually(lambda: not one.manager.held)
        assert await stream.finish() == whole
        assert stream.endpoint == two.host.endpoint


async def test_streams_move_when_another_router_comes(
    router: RouterServer, cluster: FakeCluster, card: ModelCard
) -> None:
    whole, asked = await whole_text(router), Asked(router)
    async with open_router(cluster, card, instance="router-1") as later:
        await later._membership.drain()  # its record leaves
        await eventually(lambda: not router.pipeline.peers.workers())
        async with HeldStream(cluster, router, later) as stream:
            await router._membership.drain()
            await eventually(lambda: asked.times > 3)
            assert router.manager.held
            await later._membership.undrain()
            await eventually(lambda: not router.manager.held)
            assert await stream.finish() == whole
            assert stream.endpoint == later.host.endpoint

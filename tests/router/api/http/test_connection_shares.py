"""One tenant's HTTP connections have a share of the port's, and so have those of an address without a key."""

from __future__ import annotations

import contextlib

import aiohttp
import pytest

from libs.common.connection_shares import ConnectionShare, ConnectionShares
from services.router.request.model_card import ModelCard
from slipstream.errors import Overloaded
from tests.router.conftest import eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys


def test_an_address_has_its_share_until_its_connections_have_a_tenant() -> None:
    shares = ConnectionShares(most_address=2, most_tenant=9)
    first, second = (ConnectionShare(shares, "10.0.0.7") for _ in range(2))
    assert first.fits and second.fits
    refused = ConnectionShare(shares, "10.0.0.7")
    assert not refused.fits and ConnectionShare(shares, "10.0.0.8").fits
    refused.leave()
    first.claim("a")
    assert ConnectionShare(shares, "10.0.0.7").fits


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_loopback_address_has_no_bound(address: str) -> None:
    shares = ConnectionShares(most_address=2, most_tenant=9)
    assert all(ConnectionShare(shares, address).fits for _ in range(10))


def test_a_connection_of_several_tenants_counts_for_none() -> None:
    shares = ConnectionShares(most_address=9, most_tenant=1)
    proxy, other = ConnectionShare(shares, "10.0.0.7"), ConnectionShare(shares, "10.0.0.7")
    proxy.claim("a")
    with pytest.raises(Overloaded, match="this tenant has 1 connections"):
        other.claim("a")
    proxy.claim("b")
    proxy.claim("a")
    other.claim("a")
    for share in (proxy, other, other):
        share.leave()
    assert not shares.tenants and not shares.nameless


async def test_a_tenant_beyond_its_share_is_refused_and_others_are_not(
    cluster: FakeCluster, card: ModelCard
) -> None:
    keys = tenant_keys({"key-a": "a", "key-b": "b"})
    async with open_router(cluster, card, keys=keys) as router, contextlib.AsyncExitStack() as stack:
        shares = router._http_listener._shares
        shares.most_tenant = 2
        clients = [
            await stack.enter_async_context(aiohttp.ClientSession(f"http://{router.http_endpoint}"))
            for _ in range(4)
        ]

        async def status(client: aiohttp.ClientSession, key: str) -> int:
            async with client.get("/v1/models", headers={"x-api-key": key}) as response:
                await response.read()
                return response.status

        assert [await status(client, "key-a") for client in clients[:3]] == [200, 200, 429]
        assert await status(clients[3], "key-b") == 200
        assert [await status(client, "key-a") for client in clients[:2]] == [200, 200]
        await clients[0].close()
        await eventually(lambda: shares.tenants["a"] == 1)
        assert await status(clients[2], "key-a") == 200

"""The table of classes names every route of both HTTP ports, and the ports keep to it."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from libs.common.http.admin_port import AdminPort
from libs.common.http.listening import listen_tcp
from libs.common.rpc.access import AccessControl
from libs.common.rpc.access_table import HTTP_ADMIN_CLASSES, HTTP_CLASSES
from services.router.api.admin_server import make_admin_server
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.peer_token import TokenMinter
from slipstream.rpc.scrape_token import scrape_token
from tests.router.conftest import open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys

SECRET = ClusterSecret(b"the secret of this cluster")
KEYS = tenant_keys({"key-a": "anna"})
NAME = "router-0.example:9090"
PEER_TOKENS = TokenMinter(SECRET, "decode-0").tokens_for(NAME)
OPERATOR_TOKENS = TokenMinter(SECRET, "root", CallerClass.OPERATOR).tokens_for(NAME)


def headers_of(kind: CallerClass) -> dict[str, str]:
    """The credential of a class, minted now: a test may run minutes after its module is imported."""
    return {
        CallerClass.PUBLIC: {},
        CallerClass.TENANT: {"Authorization": "Bearer key-a"},
        CallerClass.PEER: dict(PEER_TOKENS.metadata()),
        CallerClass.OPERATOR: dict(OPERATOR_TOKENS.metadata()),
    }[kind]


def routes_of(application: web.Application) -> set[str]:
    """Method and path of each route; HEAD belongs to GET."""
    return {
        f"{route.method} {route.resource.canonical}"
        for route in application.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


async def test_every_route_has_a_class(router: RouterServer) -> None:
    assert routes_of(router._http_listener._runner.app) == set(HTTP_CLASSES)
    assert routes_of(router._admin_http.application) == set(HTTP_ADMIN_CLASSES)


async def test_the_public_port_asks_tenants_for_a_key(cluster: FakeCluster, card: ModelCard) -> None:
    async with (
        open_router(cluster, card, keys=KEYS) as router,
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
    ):
        for route, needed in HTTP_CLASSES.items():
            method, path = route.split(" ")
            for kind in (CallerClass.PUBLIC, CallerClass.TENANT):
                body: dict[str, str] | None = {} if method == "POST" else None
                async with http.request(method, path, json=body, headers=headers_of(kind)) as answer:
                    assert (answer.status == 401) is (kind is not needed is CallerClass.TENANT), route


@pytest.mark.parametrize("kind", CallerClass)
async def test_an_admin_port_beyond_loopback_asks_for_an_operator(
    router: RouterServer, kind: CallerClass
) -> None:
    access = AccessControl(secret=SECRET, keys=KEYS)
    access.answer_to("0.0.0.0:9090", [NAME])
    port = AdminPort(listen_tcp("127.0.0.1:0"), access, scrape_token(SECRET))
    server = make_admin_server(
        port,
        router.manager,
        fleet=router.fleet,
        metrics=router.metrics,
        routes=router.console.routes(),
        complete_headers=router.console.complete_headers,
        keepalive_s=30.0,
    )
    await server.start()
    refused = 401 if kind is CallerClass.PUBLIC else 403
    try:
        async with aiohttp.ClientSession(f"http://{port.endpoint}") as http:
            for route, needed in HTTP_ADMIN_CLASSES.items():
                if "/console/api/events" in route and needed.admits(kind):
                    continue  # a stream without an end
                method, path = route.format(path="x", id="x", role="decode", instance="x").split(" ")
                # A POST lacks the console's header: 403 beyond the judgement of the caller.
                async with http.request(method, path, headers=headers_of(kind)) as answer:
                    if needed.admits(kind):
                        is_missing = "console_header_missing" in await answer.text()
                        assert is_missing if method == "POST" else answer.status in (200, 404), route
                    else:
                        assert answer.status == refused, route
            async with http.get("/metrics", headers={**headers_of(kind), "Host": "evil.example"}) as answer:
                assert answer.status == 403  # a page that rebinds its name
            async with http.get("/nothing", headers=headers_of(kind)) as answer:
                assert answer.status == 404
    finally:
        await server.stop()

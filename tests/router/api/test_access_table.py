"""The table of classes names every route of both HTTP ports."""

from __future__ import annotations

from aiohttp import web

from libs.common.rpc.access_table import HTTP_ADMIN_CLASSES, HTTP_CLASSES
from services.router.server import RouterServer


def routes_of(runner: web.AppRunner) -> set[str]:
    """Method and path of each route; HEAD belongs to GET."""
    return {
        f"{route.method} {route.resource.canonical}"
        for route in runner.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


async def test_every_route_has_a_class(router: RouterServer) -> None:
    assert routes_of(router._http_runner) == set(HTTP_CLASSES)
    assert routes_of(router._admin_runner) == set(HTTP_ADMIN_CLASSES)

"""The HTTP server of a router's admin port: metrics, and health with the state of each worker."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from libs.common import service_bounds
from libs.common.rpc.access import AccessControl
from libs.common.rpc.access_table import HTTP_ADMIN_CLASSES
from services.router.api.access_log import AccessLog
from services.router.api.http.connection import HttpListener, MalformedMessages
from services.router.api.http.frame import RequestFrame
from services.router.api.http.guard import HttpGuard
from services.router.api.http_errors import UNAVAILABLE_RETRY_S
from services.router.api.metrics import Metrics
from services.router.api.readiness import readiness_of
from services.router.execution.request_manager import RequestManager
from services.router.workers.fleet import RouterFleet
from slipstream.rpc.tls import TlsFiles


class AdminServer:
    """Routes of operators. Every answer is a report; none changes anything."""

    def __init__(
        self,
        runs: RequestManager,
        *,
        fleet: RouterFleet,
        metrics: Metrics,
        access: AccessControl | None,
        guard: HttpGuard,
    ) -> None:
        """`access`: the rule for callers; None on a loopback address, where every process may read."""
        self._runs = runs
        self._fleet = fleet
        self._metrics = metrics
        self._access = access
        self._guard = guard

    def listener(
        self,
        listening: socket.socket,
        *,
        tls: TlsFiles | None = None,
        keepalive_s: float = service_bounds.IDLE_CONNECTION_S,
    ) -> HttpListener:
        """What serves the routes on a socket."""
        frame = RequestFrame(self._guard, AccessLog())
        application = web.Application(middlewares=[frame.serve, self._admit])
        application.on_response_prepare.append(frame.complete_headers)
        application.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/healthz/ready", self._ready),
                web.get("/healthz/live", self._live),
                web.get("/metrics", self._metrics_text),
            ]
        )
        clock = asyncio.get_running_loop().time
        malformed = MalformedMessages(self._runs.context.counters, clock=clock)
        return HttpListener(application, listening, tls=tls, malformed=malformed, keepalive_s=keepalive_s)

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses callers by the table. Paths without a route have no class, and are not found."""
        resource = request.match_info.route.resource
        if self._access is not None and resource is not None:
            needed = HTTP_ADMIN_CLASSES[f"GET {resource.canonical}"]
            self._access.admit(needed, ((name.lower(), value) for name, value in request.headers.items()))
        return await handler(request)

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def _ready(self, request: web.Request) -> web.Response:
        return self._page({})

    async def _health(self, request: web.Request) -> web.Response:
        workers = {f"{link.worker.role}/{link.worker.instance}": link.ready for link in self._fleet.links()}
        return self._page({"workers": workers})

    def _page(self, details: Mapping[str, object]) -> web.Response:
        readiness = readiness_of(self._runs, self._fleet)
        page = {"status": readiness.value, "message": readiness.words, **details}
        if readiness.serves:
            return web.json_response(page)
        return web.json_response(page, status=503, headers={"Retry-After": str(UNAVAILABLE_RETRY_S)})

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(text=await self._metrics.render(), content_type="text/plain")

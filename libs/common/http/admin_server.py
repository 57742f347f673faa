"""The HTTP server of every process for probes, scrapes and operators: health and the process's own metrics.

async with serve_admin(open_admin_port(endpoint, secret=secret), metrics=metrics, read_health=health.read):
    ...     # the process loads and serves: its probes are answered meanwhile
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace

from aiohttp import web
from aiohttp.typedefs import Handler

from libs.common import service_bounds
from libs.common.http.admin_port import AdminPort
from libs.common.http.connection import SERVER_NAME, HttpListener, MalformedMessages
from libs.common.http.failure import UNAVAILABLE_RETRY_S, HttpRefusal
from libs.common.http.http_errors import failure_response, new_request_id
from libs.common.http.shared_render import SharedRender
from libs.common.runtime.readiness import LOADING, HealthState, ReadHealth
from libs.common.telemetry.process_metrics import ProcessMetrics
from slipstream.rpc.caller_class import CallerIdentity
from slipstream.rpc.tls import TlsFiles

log = logging.getLogger(__name__)

# Of a service whose routes read no body.
MAX_ADMIN_BODY_BYTES = 1 << 20

CompleteHeaders = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


# The caller of a request, as the access control found it.
CALLER = web.RequestKey("caller", CallerIdentity)


class AdminServer:
    """Reports to everyone who may read. Only `routes`, the further ones of the process, may change anything.

    `complete_headers` is called with each answer, after the server's own headers are set.
    """

    def __init__(
        self,
        port: AdminPort,
        *,
        metrics: ProcessMetrics,
        read_health: ReadHealth,
        routes: Iterable[web.RouteDef] = (),
        complete_headers: CompleteHeaders | None = None,
        max_body_bytes: int = MAX_ADMIN_BODY_BYTES,
        allowed_hosts: Iterable[str] = (),
        tls: TlsFiles | None = None,
        keepalive_s: float = service_bounds.IDLE_CONNECTION_S,
    ) -> None:
        self._port = port
        self._metrics = SharedRender(metrics)
        self._read_health = read_health
        self._guard = port.guard(allowed_hosts=tuple(allowed_hosts), has_pages=complete_headers is not None)
        self.application = web.Application(middlewares=[self._serve], client_max_size=max_body_bytes)
        self.application.on_response_prepare.append(_complete_headers)
        if complete_headers is not None:
            self.application.on_response_prepare.append(complete_headers)
        self.application.add_routes(
            [
                web.get("/healthz/live", self._live),
                web.get("/healthz/ready", self._ready),
                web.get("/healthz/started", self._started),
                web.get("/metrics", self._render),
                *routes,
            ]
        )
        malformed = MalformedMessages(metrics.counters, clock=asyncio.get_running_loop().time)
        self._listener = HttpListener(
            self.application, port.listening, tls=tls, malformed=malformed, keepalive_s=keepalive_s
        )

    async def start(self) -> None:
        """Accept connections."""
        await self._listener.start()

    async def stop(self) -> None:
        """Close all connections."""
        await self._listener.stop()

    @web.middleware
    async def _serve(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check a request and its caller; respond to any failure in the shape of the public port."""
        try:
            self._guard.check(request.headers)
            if request.match_info.http_exception is not None:
                raise self._no_route(request.match_info.http_exception)
            resource = request.match_info.route.resource
            assert resource is not None
            method = "GET" if request.method == "HEAD" else request.method
            request[CALLER] = self._port.admit(f"{method} {resource.canonical}", request.headers)
            return await handler(request)
        except ConnectionResetError:
            raise
        except Exception as error:
            return failure_response(error)

    def _no_route(self, error: web.HTTPException) -> HttpRefusal:
        """The refusal of a path that does not exist, or not for this method."""
        if isinstance(error, web.HTTPMethodNotAllowed):
            allowed = ", ".join(sorted(error.allowed_methods - {"HEAD"}))
            message = f"this path takes {allowed}"
            return HttpRefusal(405, message, code="method_not_allowed", headers={"Allow": allowed})
        paths = ", ".join(resource.canonical for resource in self.application.router.resources())
        return HttpRefusal(404, f"the path does not exist; there are {paths}", code="unknown_url")

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def _ready(self, request: web.Request) -> web.Response:
        return health_page(self._read_health())

    async def _started(self, request: web.Request) -> web.Response:
        """Answer startup probes: whether the process has loaded, whether or not it may take work now."""
        health = self._read_health()
        return health_page(replace(health, serves=health.status != LOADING.status))

    async def _render(self, request: web.Request) -> web.Response:
        body, content_type = await self._metrics.page(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})


@contextlib.asynccontextmanager
async def serve_admin(
    port: AdminPort, *, metrics: ProcessMetrics, read_health: ReadHealth, tls: TlsFiles | None = None
) -> AsyncIterator[None]:
    """Serve a process's admin port meanwhile, by HTTPS with `tls`."""
    server = AdminServer(port, metrics=metrics, read_health=read_health, tls=tls)
    await server.start()
    log.info("operators: HTTP at %s", port.endpoint)
    try:
        yield
    finally:
        await server.stop()


def health_page(health: HealthState, details: Mapping[str, object] | None = None) -> web.Response:
    """The page of a state: 503 where no new work can run."""
    page = {"status": health.status, "message": health.message, **health.figures, **(details or {})}
    if health.serves:
        return web.json_response(page)
    return web.json_response(page, status=503, headers={"Retry-After": str(UNAVAILABLE_RETRY_S)})


async def _complete_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER_NAME
    response.headers.setdefault("x-request-id", new_request_id())


def caller_of(request: web.Request) -> CallerIdentity:
    """The caller of a request to an admin port."""
    return request[CALLER]

"""A router's part of the admin port, beside that of every service: health of its workers, and the console."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from aiohttp import web

from libs.common.http.admin_port import AdminPort
from libs.common.http.admin_server import AdminServer, CompleteHeaders, health_page
from libs.common.telemetry.process_metrics import ProcessMetrics
from services.router.api.readiness import readiness_of
from services.router.execution.request_manager import RequestManager
from services.router.workers.fleet import RouterFleet
from slipstream import bounds
from slipstream.rpc.tls import TlsFiles


def make_admin_server(
    port: AdminPort,
    manager: RequestManager,
    *,
    fleet: RouterFleet,
    metrics: ProcessMetrics,
    routes: Iterable[web.RouteDef] = (),
    complete_headers: CompleteHeaders | None = None,
    allowed_hosts: Iterable[str] = (),
    tls: TlsFiles | None = None,
    keepalive_s: float,
) -> AdminServer:
    """The server of a router's admin port. `routes` and `complete_headers` are those of its console."""

    async def health(request: web.Request) -> web.Response:
        workers = {f"{link.worker.role}/{link.worker.instance}": link.ready for link in fleet.links()}
        return health_page(readiness_of(manager, fleet), {"workers": workers})

    return AdminServer(
        port,
        metrics=metrics,
        read_health=partial(readiness_of, manager, fleet),
        routes=[web.get("/healthz", health), *routes],
        complete_headers=complete_headers,
        max_body_bytes=bounds.MAX_BODY_BYTES,
        allowed_hosts=allowed_hosts,
        tls=tls,
        keepalive_s=keepalive_s,
    )

"""One worker process from its start to its end, the same for prefill, decode and drafter.

Start: bind, alive, health and metrics over HTTP, load, register memory, warm up, announce on a lease, ready.
End (SIGTERM, SIGINT): out of discovery, not ready, new work refused, what runs gets `drain_s`, exit 0.
The same signal again, or before the worker is ready: the end at once. `bounded_end.py` has what hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

import grpc

from libs.common.cluster.fleet_member import FleetMember, MemberProcess, open_discovery
from libs.common.cluster.worker_record import Role, Worker
from libs.common.cluster.worker_service import WorkerIdentity, WorkerService
from libs.common.etcd.access import EtcdAccess
from libs.common.http.admin_port import open_admin_port
from libs.common.http.admin_server import serve_admin
from libs.common.rpc.access import access_of
from libs.common.rpc.serve import ServiceHost
from libs.common.runtime import heap
from libs.common.runtime.exit_codes import MODEL_UNUSABLE
from libs.common.runtime.extras import missing_package
from libs.common.runtime.malloc import STEP_HEAP_BYTES, keep_freed_memory
from libs.common.runtime.readiness import HealthState, ProcessHealth, loading
from libs.common.runtime.settings import parse_endpoints
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.logs import configure_logging, log_loop_errors
from libs.common.telemetry.otlp import export_metrics
from libs.common.telemetry.process_metrics import ProcessMetrics
from libs.common.telemetry.tracing import configure_tracing
from libs.common.worker_bounds import STOP_GRACE_S
from libs.engine.step.load_progress import LoadProgress
from libs.worker.process.app import WorkerApp
from libs.worker.process.bounded_end import BoundedEnd
from libs.worker.process.model_unusable import ModelUnusable
from libs.worker.process.settings import WorkerSettings
from slipstream.errors import SlipstreamError
from slipstream.v1 import worker_pb2_grpc

log = logging.getLogger(__name__)

WORKER_SERVICE = "slipstream.v1.WorkerService"

MakeServer = Callable[..., grpc.aio.Server]


def run_worker(
    role: Role,
    options: WorkerSettings,
    make_app: Callable[[], WorkerApp],
    *,
    make_server: MakeServer = grpc.aio.server,
) -> int:
    """The whole life of a process; returns its exit status."""
    keep_freed_memory(STEP_HEAP_BYTES)
    configure_logging(role, options.instance, level=options.log_level, form=options.log_format)
    configure_tracing(role, options.instance)
    options.warn_of_exposed_secrets()

    async def main() -> int:
        end = BoundedEnd()
        try:
            status = await serve_worker(role, options, make_app(), end, make_server=make_server)
        except SlipstreamError as error:  # a refused setting or a missing file: one line names it
            log.error("%s cannot start: %s", options.instance, options.named(error))
            status = MODEL_UNUSABLE if isinstance(error, ModelUnusable) else 1
        except ModuleNotFoundError as error:
            log.error("%s cannot start: %s", options.instance, missing_package(error, role))
            status = 1
        await end.finish(status)
        return status

    return asyncio.run(main())


async def serve_worker(
    role: Role,
    options: WorkerSettings,
    app: WorkerApp,
    end: BoundedEnd,
    *,
    make_server: MakeServer = grpc.aio.server,
) -> int:
    """Serve until a signal stops it. 0 after an orderly end, 1 when the worker broke."""
    log_loop_errors()
    names = parse_endpoints(options.server_names)
    host = ServiceHost(
        options.listen,
        advertise=options.advertise,
        tls=options.tls(),
        access=access_of(options),
        names=names,
        make_server=make_server,
    )
    port = open_admin_port(
        options.admin_http,
        secret=options.cluster_secret(),
        advertised=host.endpoint,
        advertise=options.admin_http_advertise,
        names=names,
    )
    health = ProcessHealth(lambda: _loading(app.progress))
    metrics = _metrics(role, options, app, host, health)
    await host.start([app.service_name, WORKER_SERVICE])
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(host.stop, grace_s=STOP_GRACE_S)
        await stack.enter_async_context(
            serve_admin(port, metrics=metrics, read_health=health.read, tls=options.tls_of_http())
        )
        await stack.enter_async_context(export_metrics(metrics, instance=options.instance))
        discovery = await open_discovery(EtcdAccess.of(options), stack)
        stack.push_async_callback(end.close, app.close)
        await app.open(host.endpoint, discovery, host.request_stop)
        identity = _identity(role, options.instance, app)
        record = _record(role, options, app, endpoint=host.endpoint, incarnation=identity.incarnation)
        record = replace(record, admin_http=port.advertised)
        member = FleetMember(host, discovery, record, health)
        worker = WorkerService(identity, _AppProcess(app, metrics, member, host))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, host.server)
        app.register(host.server, worker.load_changed)
        heap.freeze_heap()
        await member.join()
        await host.wait_for_stop()
        log.info("%s stops", options.instance)
        await worker.drain(is_final=True)
        if not app.broken:
            await worker.wait_idle(timeout_s=options.drain_s)
    return 1 if app.broken else 0


def _loading(progress: LoadProgress) -> HealthState:
    return loading(
        progress.done_bytes,
        progress.total_bytes,
        done_captures=progress.done_captures,
        total_captures=progress.total_captures,
    )


def _metrics(
    role: Role, options: WorkerSettings, app: WorkerApp, host: ServiceHost, health: ProcessHealth
) -> ProcessMetrics:
    """An engine's metrics carry vLLM's names too, with the name of the model's directory."""

    def measure(_: Counters) -> dict[str, float]:
        return {**app.measure(), **host.figures(), **health.figures()}

    metrics = ProcessMetrics(role, app.counters, measure)
    if role is not Role.DRAFTER and options.model is not None:
        metrics.model = options.model.resolve().name
    return metrics


class _AppProcess(MemberProcess):
    """The process around an app."""

    def __init__(
        self, app: WorkerApp, metrics: ProcessMetrics, member: FleetMember, host: ServiceHost
    ) -> None:
        super().__init__(app, metrics, member, host)
        self._app = app

    async def drain(self) -> None:
        await self._app.drain()
        await super().drain()

    async def undrain(self) -> None:
        self._app.undrain()
        await super().undrain()


def _identity(role: Role, instance: str, app: WorkerApp) -> WorkerIdentity:
    return WorkerIdentity(
        role=role,
        instance=instance,
        fingerprint=app.fingerprint.to_proto() if app.fingerprint is not None else None,
        transport=app.transport_kind,
    )


def _record(
    role: Role, options: WorkerSettings, app: WorkerApp, *, endpoint: str, incarnation: str
) -> Worker:
    return Worker(
        role=role,
        instance=options.instance,
        endpoint=endpoint,
        incarnation=incarnation,
        fingerprint=app.record_fingerprint,
        capacity=app.capacity,
        region=options.region,
        session_digest=app.session_digest,
    )

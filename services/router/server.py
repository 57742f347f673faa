"""Builds the parts of a router process, and starts and stops them in order.

Start: bind the ports, look for workers within a bound, serve gRPC, operators and HTTP, join discovery.
End: refuse new requests, leave discovery, hand over what another router continues, give the others
`grace_s`, abort what is left, close the ports. `__main__.py` waits for the signals.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from libs.common.cluster.discovery import Discovery
from libs.common.cluster.exit_reports import ExitReports
from libs.common.cluster.placements import Placements
from libs.common.cluster.worker_record import Role, Worker
from libs.common.cluster.worker_service import WorkerIdentity, WorkerProcess, WorkerService
from libs.common.http.guard import HttpGuard
from libs.common.http.listening import endpoint_of
from libs.common.rpc.access import Metadata, current_caller
from libs.common.rpc.serve import Context
from libs.common.rpc.single_request import TimedReads
from libs.common.runtime.readiness import membership_figures
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.process_metrics import ProcessMetrics
from libs.common.telemetry.recent_rate import WINDOW_S
from services.router.admission.grpc_connections import GrpcConnections
from services.router.admission.keyless_connections import end_keyless
from services.router.admission.tenant_shares import ReceiveSlots, TextShares, sent_shares
from services.router.api.access_log import AccessLog
from services.router.api.admin_server import make_admin_server
from services.router.api.families import add_families
from services.router.api.http_server import HttpServer
from services.router.api.jobs.assembly import RouterJobs
from services.router.api.metrics import begin_series, measure_fleet
from services.router.api.responses.assembly import make_responses
from services.router.api.responses.operations import ResponseOperations
from services.router.api.rpc.server import GrpcServer
from services.router.autoscale.assembly import add_autoscale
from services.router.autoscale.signals import FleetSignals
from services.router.console.assembly import make_console
from services.router.console.console import Console
from services.router.console.fleet_view import RouterIdentity
from services.router.event_loop_lag import EventLoopLag
from services.router.membership import RouterMembership
from services.router.operators.assembly import add_fleet_service
from services.router.operators.process_calls import ProcessCalls
from services.router.operators.request_rates import RequestRates
from services.router.options import RouterOptions
from services.router.pipeline import RequestPipeline
from services.router.ports import open_ports
from services.router.request.model_card import ModelCard
from slipstream.errors import Overloaded
from slipstream.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

_KEYS_CHECK_S = 1.0
WORKER_SERVICE_NAME = "slipstream.v1.WorkerService"
# Waits before a router serves: for discovery to name workers, and for these to answer. A process that shares
# its ports gets requests as soon as it accepts. Clients and health checks retry a single process.
_LOOK_S, _CONNECT_S = 1.0, 10.0
_LOOK_ALONE_S, _CONNECT_ALONE_S = 0.3, 2.0


class RouterServer:
    """The gRPC and HTTP servers before one pipeline. Needs a running event loop."""

    def __init__(
        self,
        card: ModelCard,
        discovery: Discovery,
        placements: Placements,
        options: RouterOptions,
        *,
        exit_reports: ExitReports | None = None,
    ) -> None:
        self._discovery, self._placements, self._options = discovery, placements, options
        self._http_tls = options.tls if options.http_tls else None
        self._received, self._reads = ReceiveSlots(), TimedReads()
        self._connections = GrpcConnections(clock=time.monotonic)
        self.ports = open_ports(options, read=self._read_request, on_refused=self._note_refused)
        self.host, self.admin = self.ports.public, self.ports.admin
        self._identity = WorkerIdentity(Role.ROUTER, options.instance)
        self._record = Worker(
            Role.ROUTER,
            options.instance,
            self.host.endpoint,
            self._identity.incarnation,
            admin=self.admin.endpoint,
            admin_http=self.ports.admin_http.advertised,
        )
        self.pipeline = RequestPipeline(card, discovery, placements, options, exit_reports=exit_reports)
        self.counters, self.fleet = self.pipeline.counters, self.pipeline.fleet
        self.manager, self.recorder = self.pipeline.manager, self.pipeline.recorder
        self.loop_delay = EventLoopLag(asyncio.get_running_loop().time)
        self._rates = RequestRates(self.counters, time.monotonic)
        self._membership = RouterMembership(
            discovery, self._record, self.manager, self.fleet, self.pipeline.peers, (self.host, self.admin)
        )
        self.metrics = ProcessMetrics(Role.ROUTER, self.counters, self._measure)
        self.metrics.model = self.pipeline.card.name
        begin_series(self.counters)
        self._serve_clients()
        self._serve_operators()

    def _serve_clients(self) -> None:
        """Make what the public ports serve."""
        options, card = self._options, self.pipeline.card
        access_log = replace(options.access_log, counters=self.counters)
        sent = sent_shares()
        self.jobs = RouterJobs(options, self.manager, self.fleet)
        responses = make_responses(
            card,
            options.database,
            self.jobs.store,
            ttl_s=options.response_ttl_s,
            wall_clock_s=time.time,
            run_piece=self.manager.context.threads.run,
        )
        self._grpc = self._make_grpc(access_log, sent, responses)
        self.jobs.serve(self._grpc)
        self._http = self._make_http(access_log, sent)
        self._tasks = add_families(
            self._http, self._grpc, self.manager, card, self.jobs, responses, database=options.database
        )
        # What bounds idle connections bounds a request header that never ends, too.
        self._http_listener = self._http.listener(
            self.ports.http, tls=self._http_tls, keepalive_s=options.idle_connection_s
        )

    def _serve_operators(self) -> None:
        """Make what the admin ports serve."""
        options = self._options
        calls = ProcessCalls(self.pipeline.dial, options.secret)
        self._worker_service = self._make_worker_service()
        self._operator_services = self._add_operator_services(calls)
        self.console = self._make_console(calls)
        self._admin_http = make_admin_server(
            self.ports.admin_http,
            self.manager,
            fleet=self.fleet,
            metrics=self.metrics,
            routes=self.console.routes(),
            complete_headers=self.console.complete_headers,
            allowed_hosts=options.allowed_hosts,
            tls=self._http_tls,
            keepalive_s=options.idle_connection_s,
        )

    def _make_grpc(
        self, access_log: AccessLog, sent: TextShares, responses: ResponseOperations
    ) -> GrpcServer:
        """RouterService at the public port."""
        server = GrpcServer(
            self.manager,
            responses,
            fleet=self.fleet,
            sessions=self.pipeline.sessions,
            card=self.pipeline.card,
            keys=self._options.keys,
            sent=sent,
            access_log=access_log,
            write_stall_s=self._options.write_stall_s,
        )
        server.add_to(self.host.server)
        return server

    def _make_http(self, access_log: AccessLog, sent: TextShares) -> HttpServer:
        options = self._options
        return HttpServer(
            self.manager,
            fleet=self.fleet,
            card=self.pipeline.card,
            keys=options.keys,
            sent=sent,
            guard=HttpGuard.of(
                options.http, allowed_hosts=options.allowed_hosts, cors_origins=options.cors_origins
            ),
            access_log=access_log,
            received=self._received,
            body_read_s=options.body_read_s,
            write_stall_s=options.write_stall_s,
        )

    def _make_worker_service(self) -> WorkerService:
        """Make the service that every process of the cluster has: status, draining, counters."""
        service = WorkerService(self._identity, _RouterProcess(self, self._membership))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, self.admin.server)
        return service

    def _add_operator_services(self, calls: ProcessCalls) -> list[str]:
        """Serve operators at the admin port. Returns the full names of all services there."""
        pipeline, options = self.pipeline, self._options
        self.signals = FleetSignals(
            pipeline.fleet,
            pipeline.peers,
            own=self._record,
            load=self.load,
            sessions=pipeline.sessions.all,
        )
        fleet_service = add_fleet_service(
            self.admin,
            pipeline.members,
            pipeline.fleet,
            pipeline.peers,
            calls,
            own=self._record,
            model=pipeline.card.name,
            load=self.load,
        )
        return [
            WORKER_SERVICE_NAME,
            *add_autoscale(self.admin, self.signals, options.autoscale),
            fleet_service,
        ]

    def _make_console(self, calls: ProcessCalls) -> Console:
        pipeline = self.pipeline
        identity = RouterIdentity(
            self._options.instance,
            endpoint=self.host.endpoint,
            http_endpoint=self.http_endpoint,
            admin_http=self._record.admin_http,
            model=pipeline.card.name,
            started_s=asyncio.get_running_loop().time(),
        )
        return make_console(
            identity,
            self.manager,
            pipeline.members,
            pipeline.peers,
            dial=pipeline.dial,
            calls=calls,
            chat=self._http.admin_chat("/console/api/chat"),
            jobs=self.jobs.overview,
        )

    @property
    def http_endpoint(self) -> str:
        """host:port of the HTTP server, with the port that was bound."""
        return endpoint_of(self.ports.http)

    @property
    def admin_http_endpoint(self) -> str:
        """host:port of the HTTP server of metrics and health."""
        return self.ports.admin_http.endpoint

    async def start(self) -> None:
        """Serve; ready as soon as requests can run."""
        await self.pipeline.start()
        self.loop_delay.start()
        look_s, connect_s = _LOOK_ALONE_S, _CONNECT_ALONE_S
        if self._options.share_ports:
            look_s, connect_s = _LOOK_S, _CONNECT_S
        # The kernel queues connections meanwhile. So a router that restarts refuses none for want of workers.
        if not await self.pipeline.has_workers(look_s=look_s, connect_s=connect_s):
            log.info("serves without having seen a prefill and a decode worker")
        await self.host.start(self._grpc.service_names)
        await self.admin.start(self._operator_services)
        await self._http_listener.start()
        await self._admin_http.start()
        self._tasks.append(asyncio.create_task(self._membership.follow_readiness(), name="readiness"))
        self._tasks.append(asyncio.create_task(self._follow_keys(), name="revoked-keys"))
        self._tasks.append(asyncio.create_task(self._end_keyless(), name="keyless-connections"))
        self._tasks.append(asyncio.create_task(self._sample_rates(), name="rates"))
        self.jobs.start()
        self._membership.join()
        log.info("gRPC on %s, HTTP on %s", self.host.endpoint, self.http_endpoint)
        log.info("operators: gRPC at %s, HTTP at %s", self.admin.endpoint, self.admin_http_endpoint)

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new requests, give running ones `grace_s` to end, abort the others, release everything."""
        await self._worker_service.drain(is_final=True)
        deadline_s = time.monotonic() + grace_s
        while self.manager.held and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        await self.jobs.close()
        await self.manager.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.console.close()
        await self._http_listener.stop()
        await self._admin_http.stop()
        self.loop_delay.close()
        await asyncio.gather(self.host.stop(grace_s=1.0), self.admin.stop(grace_s=1.0))
        await self.pipeline.close()

    async def _sample_rates(self) -> None:
        """Let the rates of a report be those of the last seconds, however long ago the last reader asked."""
        while True:
            self.load()
            await asyncio.sleep(WINDOW_S / 2)

    async def _read_request(self, method: str, context: Context) -> Any:
        """The message of an accepted call, within its tenant's shares of connections and messages."""
        self._grpc.name_call(context)
        tenant, began_s = current_caller().tenant, self._grpc.clock()
        try:
            if not self._options.keys.open:  # else all clients are one tenant
                self._count_connection(context.peer(), tenant)
            await self._received.enter(tenant)
            try:
                return await self._reads.read(method, context)
            finally:
                self._received.leave(tenant)
        except BaseException as error:
            self._grpc.note_unread(method, context, error, began_s=began_s)
            raise
        finally:
            del context  # see libs/common/rpc/serve.py

    def _count_connection(self, peer: str, tenant: str) -> None:
        """Count the connection of the call that this task handles, until the call ends. Raises Overloaded."""
        try:
            self._connections.begin_call(peer, tenant)
        except Overloaded:
            self.counters.add("slipstream_requests_refused_total")
            raise
        handler = asyncio.current_task()
        assert handler is not None
        handler.add_done_callback(lambda _: self._connections.end_call(peer))

    def _note_refused(self, *call: Any) -> Metadata:
        return self._grpc.note_refused(*call)

    async def _follow_keys(self) -> None:
        """End what runs by keys that were revoked or have expired."""
        while True:
            await asyncio.sleep(_KEYS_CHECK_S)
            self.manager.end_revoked(self._options.keys.counts)

    async def _end_keyless(self) -> None:
        """End connections that show no key; where none are configured, all clients are one tenant."""
        if not self._options.keys.open:
            await end_keyless(self._connections, self.counters, listen=self.host.bound)

    def _measure(self, counters: Counters) -> Mapping[str, float]:
        measure_fleet(counters, self.fleet)
        return {
            **self.loop_delay.gauges(),
            **self.manager.gate.gauges(),
            **self.jobs.gauges(),
            **self.fleet.index.gauges(),
            **self.pipeline.token_cache.gauges(),
            **self._placements.figures(),
            **membership_figures(
                is_draining=self.manager.draining, has_lost_lease=self._discovery.has_lost_lease
            ),
            **self.host.figures(),
            "slipstream_grpc_malformed_total": self.host.malformed.count + self.admin.malformed.count,
        }

    def load(self) -> worker_pb2.LoadReport:
        """The load that workers' status, other routers and the autoscaler read."""
        gate, wanted = self.manager.gate, self.manager.gate.wanted()
        report = worker_pb2.LoadReport(
            requests_running=gate.running,
            requests_waiting=gate.waiting,
            requests_waiting_decode=wanted.decode_requests,
            requests_allowed=self._options.max_requests,
            requests_admitted=gate.admitted,
            prefill_tokens_in_flight=wanted.prefill_tokens,
            draining=self.manager.draining,
            ready=self._membership.is_ready,
            busy_share=self.loop_delay.busy_share(),
            event_loop_delay_ms=self.loop_delay.window.mean_ms,
            requests_unplaced=self.fleet.unplaced.count,
        )
        return self.jobs.add_to(self._rates.add_to(report))


class _RouterProcess(WorkerProcess):
    """A router's process, for its WorkerService."""

    def __init__(self, server: RouterServer, membership: RouterMembership) -> None:
        self._server, self._membership = server, membership

    def load(self) -> worker_pb2.LoadReport:
        return self._server.load()

    def ledger(self) -> worker_pb2.Ledger:
        return worker_pb2.Ledger(sequences=self._server.manager.held)

    def status_counters(self) -> Mapping[str, float]:
        return self._server.metrics.snapshot()

    async def drain(self) -> None:
        await self._membership.drain()

    async def undrain(self) -> None:
        await self._membership.undrain()

    def exit(self) -> None:
        self._server.host.request_stop()

"""One kvstore process from start to end.

Start: bind the ports, serve health and metrics over HTTP, register the arena, scan the disks, join
discovery, report ready.
End: leave discovery, refuse new pins and reservations, give open ones `drain_s`, write the queue to
disk, close the transport.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from libs.common.cluster.address_book import AddressBook, open_address_book, session_digest
from libs.common.cluster.fleet_member import FleetMember, MemberProcess, open_discovery
from libs.common.cluster.worker_record import Role, Worker
from libs.common.cluster.worker_service import WorkerIdentity, WorkerService
from libs.common.http.admin_port import open_admin_port
from libs.common.http.admin_server import serve_admin
from libs.common.kv_events.log import BlockEventLog
from libs.common.kv_events.server import KvEventServicer
from libs.common.rpc.serve import ServiceHost
from libs.common.runtime import heap
from libs.common.runtime.readiness import ProcessHealth
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.logs import log_loop_errors
from libs.common.telemetry.otlp import export_metrics
from libs.common.telemetry.process_metrics import ProcessMetrics
from libs.common.transport.base import KvTransport
from libs.common.transport.open import open_transport
from services.kvstore.core.events import publish_changes
from services.kvstore.core.metrics import evictions, occupancy
from services.kvstore.core.node import Node, now_ms
from services.kvstore.disk.config import check_disks
from services.kvstore.disk.opening import run_in_daemon_thread, wait_with_progress
from services.kvstore.disk.set import DiskSet
from services.kvstore.disk.tier import DiskTier
from services.kvstore.dram.tier import DramTier
from services.kvstore.policy.admission import DiskAdmission, WriteBudget
from services.kvstore.pool.tier import PoolTier
from services.kvstore.service import KvstoreServicer
from services.kvstore.settings import NodeOptions
from slipstream.rpc.hosts import host_of
from slipstream.v1 import kv_events_pb2_grpc, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

CHECK_S = 1.0
_STOP_GRACE_S = 1.0


async def serve(options: NodeOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises SlipstreamError when it cannot start."""
    log_loop_errors()
    options.check()
    if options.disk_bytes:
        await _check_disks(options)
    host = ServiceHost(
        options.listen,
        advertise=options.advertise,
        tls=options.tls,
        access=options.access,
        names=options.server_names,
    )
    port = open_admin_port(
        options.admin_http,
        secret=options.secret,
        advertised=host.endpoint,
        advertise=options.admin_http_advertise,
        names=options.server_names,
    )
    health, counters = ProcessHealth(), Counters()
    servicers: _Servicers | None = None

    def measure(_: Counters) -> dict[str, float]:
        return {**host.figures(), **health.figures(), **(servicers.measure() if servicers else {})}

    metrics = ProcessMetrics(Role.KVSTORE, counters, measure)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(host.stop, grace_s=_STOP_GRACE_S)
        await stack.enter_async_context(
            serve_admin(port, metrics=metrics, read_health=health.read, tls=options.admin_http_tls)
        )
        await stack.enter_async_context(export_metrics(metrics, instance=options.instance))
        await host.start([f"slipstream.v1.{name}Service" for name in ("Kvstore", "KvEvent", "Worker")])
        transport = open_transport(
            options.transport, host_of(host.endpoint), bind=options.kv_bind, advertise=options.kv_advertise
        )
        stack.push_async_callback(transport.close)
        discovery = await open_discovery(options.etcd, stack, ttl_s=options.etcd_lease_s)
        addresses = await open_address_book(discovery, stack)
        node = await _open_node(options, transport, counters, term=lambda: discovery.term)
        stack.push_async_callback(node.close)
        identity = WorkerIdentity("kvstore", options.instance, transport=transport.kind)
        record = _record(options, host.endpoint, identity, node, session_digest(transport.session_id))
        record = replace(record, admin_http=port.advertised)
        member = FleetMember(host, discovery, record, health)
        worker = WorkerService(identity, _NodeProcess(node, metrics, member, host))
        servicers = _Servicers(node, transport, worker, addresses, metrics.counters, identity.incarnation)
        servicers.add_to(host)
        node.start(servicers.worker)
        heap.freeze_heap()
        await member.join()
        await host.wait_for_stop()
        log.info("%s stops", options.instance)
        await servicers.worker.drain(is_final=True)
        await servicers.worker.wait_idle(timeout_s=options.drain_s)
        servicers.kvstore.pin_streams.close()
        await host.stop(grace_s=_STOP_GRACE_S)  # before its calls' resources are closed


class _NodeProcess(MemberProcess):
    """The process around a node."""

    def __init__(self, node: Node, metrics: ProcessMetrics, member: FleetMember, host: ServiceHost) -> None:
        super().__init__(node, metrics, member, host)
        self._store = node.store

    def evictions(self) -> Sequence[worker_pb2.TierEviction]:
        return evictions(self._store)


class _Servicers:
    """The gRPC servicers of one node."""

    def __init__(
        self,
        node: Node,
        transport: KvTransport,
        worker: WorkerService,
        addresses: AddressBook,
        counters: Counters,
        incarnation: str,
    ) -> None:
        self._node = node
        self._counters = counters
        self.worker = worker
        self.kvstore = KvstoreServicer(
            node.store,
            node.puts,
            transport,
            worker,
            addresses=addresses,
            counters=counters,
        )
        self.events = KvEventServicer(BlockEventLog(incarnation))
        publish_changes(node.store, self.events)

    def measure(self) -> dict[str, float]:
        """Gauges by metric name; sets those with labels."""
        self._counters.replace("slipstream_kv_occupancy_ratio", occupancy(self._node.store))
        return {**self._node.measure(), **self.kvstore.measure()}

    def add_to(self, host: ServiceHost) -> None:
        """Register the servicers, so that the host answers their calls."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.worker, host.server)
        kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(self.kvstore, host.server)
        kv_events_pb2_grpc.add_KvEventServiceServicer_to_server(self.events, host.server)


def _record(
    options: NodeOptions, endpoint: str, identity: WorkerIdentity, node: Node, kv_session: str
) -> Worker:
    return Worker(
        Role.KVSTORE,
        options.instance,
        endpoint,
        identity.incarnation,
        capacity={"dram_bytes": node.store.dram.memory.n_bytes, "disk_bytes": options.disk_bytes},
        region=options.region,
        session_digest=kv_session,
    )


async def _check_disks(options: NodeOptions) -> None:
    """Raises InvalidArgument, FailedPrecondition. Skips the check if a disk does not answer."""
    checking = run_in_daemon_thread("kv-check", lambda: check_disks(options.disks, options.disk_bytes))
    if not await wait_with_progress(checking, hangs_after_s=CHECK_S):
        log.warning("a disk does not answer: none of them is checked")
        return
    for warning in checking.result():
        log.warning("%s", warning)


async def _open_node(
    options: NodeOptions, transport: KvTransport, counters: Counters, *, term: Callable[[], int | None]
) -> Node:
    dram = DramTier(options.dram_bytes, tenant_share=options.tenant_share, checksum=options.checksum)
    if (used := dram.memory.n_bytes) != options.dram_bytes:
        slab_bytes = dram.table.slab_bytes
        log.info("--dram-bytes %d is rounded to %d: whole slabs of %d", options.dram_bytes, used, slab_bytes)
    transport.register(dram.memory.buffer)
    disks = None
    if options.disk_bytes:
        disks = DiskSet(
            [
                DiskTier(
                    directory,
                    disk_bytes=options.disk_bytes,
                    tenant_share=options.tenant_share,
                    checksum=options.checksum,
                )
                for directory in options.disks
            ]
        )
        await disks.open_async()
    per_day = options.disk_write_bytes_per_day
    budget = WriteBudget(per_day, now_ms=now_ms()) if per_day else None
    return Node(
        dram,
        disks,
        transport,
        term=term,
        scrub_bytes_per_s=options.scrub_bytes_per_s,
        admission=DiskAdmission(budget),
        pool=PoolTier(dram, options.pool) if options.pool is not None else None,
        counters=counters,
    )

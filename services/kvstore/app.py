"""One kvstore process from its start to its end.

Start: bind, alive; arena registered; disk scanned; announced; ready.
End: out of discovery, new pins and reservations refused, what is held gets `drain_s`, what waits for
the disk is written, then the transport closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from libs.common import heap
from libs.common.discovery import LEASE_TTL_S, Discovery, EtcdDiscovery, InMemoryDiscovery
from libs.common.errors import DeadlineExceeded, InvalidArgument
from libs.common.etcd.client import EtcdClient
from libs.common.kv_event_log import BlockEventLog
from libs.common.kv_events import KvEventServicer
from libs.common.serve import ServiceHost
from libs.common.telemetry import Counters
from libs.common.tls import TlsFiles
from libs.common.transport.base import KvTransport
from libs.common.transport.open import open_transport
from libs.common.worker_record import Role, Worker
from libs.common.worker_service import WorkerIdentity, WorkerService, held
from services.kvstore.disk.config import check_disks
from services.kvstore.disk.opening import in_daemon_thread, wait_patiently
from services.kvstore.disk.scrub import Scrubber
from services.kvstore.disk.set import DiskSet
from services.kvstore.disk.tier import DiskTier
from services.kvstore.dram.tier import DramTier
from services.kvstore.events import tell_of_changes
from services.kvstore.figures import tier_figures
from services.kvstore.policy.admission import DiskAdmission, WriteBudget
from services.kvstore.pool.config import PoolOptions
from services.kvstore.pool.tier import PoolTier
from services.kvstore.puts import Puts, one_term
from services.kvstore.service import KvstoreServicer
from services.kvstore.store import BlockStore
from slipstream.v1 import kv_events_pb2_grpc, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

MIN_DRAM_BYTES = 1 << 20
MIN_DISK_BYTES = 1 << 20
EXPIRY_TICK_S = 0.25
FLUSH_S = 10.0
CHECK_S = 1.0
_ANNOUNCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. `disk_bytes` is of each disk; 0 means no disk tier."""

    instance: str
    listen: str
    etcd: str
    disks: tuple[Path, ...]
    dram_bytes: int
    disk_bytes: int
    transport: str
    drain_s: float
    scrub_bytes_per_s: int = 0
    tenant_share: float = 1.0
    disk_write_bytes_per_day: int = 0  # of all disks; 0 = no limit
    etcd_lease_s: int = LEASE_TTL_S
    tls: TlsFiles | None = None
    region: str = ""
    pool: PoolOptions | None = None

    def check(self) -> None:
        """Raises InvalidArgument for what cannot work."""
        if self.dram_bytes < MIN_DRAM_BYTES:
            raise InvalidArgument("--dram-bytes", f"must be at least {MIN_DRAM_BYTES}")
        if not 0.0 < self.tenant_share <= 1.0:
            raise InvalidArgument("--tenant-share", "must be above 0 and at most 1")
        if self.disk_write_bytes_per_day < 0:
            raise InvalidArgument("--disk-write-bytes-per-day", "must not be negative")
        if self.disk_bytes and self.disk_bytes < MIN_DISK_BYTES:
            raise InvalidArgument("--disk-bytes", f"must be 0 or at least {MIN_DISK_BYTES}")
        if self.scrub_bytes_per_s < 0:
            raise InvalidArgument("--scrub-bytes-per-s", "must not be negative")
        if self.pool is not None:
            self.pool.check()


async def serve(options: Options) -> None:
    """Serve until SIGTERM or SIGINT. Raises FailedPrecondition and the like when it cannot start."""
    options.check()
    if options.disk_bytes:
        await _check_disks(options)
    host = ServiceHost(options.listen, tls=options.tls)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(host.stop, grace_s=1.0)
        await host.start([f"slipstream.v1.{name}Service" for name in ("Kvstore", "KvEvent", "Worker")])
        transport = open_transport(options.transport, options.listen.rsplit(":", 1)[0])
        stack.push_async_callback(transport.close)
        discovery = await _open_discovery(options, stack)
        node = await _open_node(options, transport, term=lambda: discovery.term)
        stack.push_async_callback(node.close)
        identity = WorkerIdentity("kvstore", options.instance, transport=transport.kind)
        capacity = {"dram_bytes": node.store.dram.memory.n_bytes, "disk_bytes": options.disk_bytes}
        record = Worker(
            Role.KVSTORE,
            options.instance,
            host.endpoint,
            identity.incarnation,
            capacity=capacity,
            region=options.region,
        )

        async def leave() -> None:
            await host.set_ready(False)
            await discovery.withdraw(record)

        worker = WorkerService(
            identity,
            load=node.load,
            ledger=node.ledger,
            counters=lambda: {**node.totals(), **servicer.figures()},
            on_drain=leave,
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, host.server)
        servicer = KvstoreServicer(
            node.store,
            node.puts,
            transport,
            check_accepting=worker.refuse_when_draining,
            changed=worker.load_changed,
        )
        kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(servicer, host.server)
        events = KvEventServicer(BlockEventLog(identity.incarnation))
        tell_of_changes(node.store, events)
        kv_events_pb2_grpc.add_KvEventServiceServicer_to_server(events, host.server)
        node.start(worker)
        heap.settle()
        discovery.announce(record)
        try:
            await discovery.wait_announced(timeout_s=_ANNOUNCE_S)
        except DeadlineExceeded:
            log.warning("etcd does not answer; announced as soon as it does")
        await host.set_ready(True)
        log.info("%s is ready at %s", options.instance, host.endpoint)
        await host.wait_for_stop()
        log.info("%s stops", options.instance)
        await worker.drain()
        await node.wait_idle(timeout_s=options.drain_s)
        servicer.pin_streams.close()
        await host.stop(grace_s=1.0)  # before what its calls use is closed


async def _check_disks(options: Options) -> None:
    """Raises InvalidArgument, FailedPrecondition. Disks that do not answer are not checked."""
    checking = in_daemon_thread("kv-check", lambda: check_disks(options.disks, options.disk_bytes))
    if not await wait_patiently(checking, hangs_after_s=CHECK_S):
        log.warning("a disk does not answer: none of them is checked")
        return
    for warning in checking.result():
        log.warning("%s", warning)


async def _open_node(options: Options, transport: KvTransport, *, term: Callable[[], int | None]) -> Node:
    dram = DramTier(options.dram_bytes, tenant_share=options.tenant_share)
    if (used := dram.memory.n_bytes) != options.dram_bytes:
        slab_bytes = dram.table.slab_bytes
        log.info("--dram-bytes %d is rounded to %d: whole slabs of %d", options.dram_bytes, used, slab_bytes)
    transport.register(dram.memory.buffer)
    disks = None
    if options.disk_bytes:
        disks = DiskSet(
            [
                DiskTier(directory, disk_bytes=options.disk_bytes, tenant_share=options.tenant_share)
                for directory in options.disks
            ]
        )
        await disks.open_soon()
    per_day = options.disk_write_bytes_per_day
    budget = WriteBudget(per_day, now_ms=_now_ms()) if per_day else None
    return Node(
        dram,
        disks,
        transport,
        term=term,
        scrub_bytes_per_s=options.scrub_bytes_per_s,
        admission=DiskAdmission(budget),
        pool=PoolTier(dram, options.pool) if options.pool is not None else None,
    )


async def _open_discovery(options: Options, stack: contextlib.AsyncExitStack) -> Discovery:
    if not options.etcd:
        return InMemoryDiscovery()
    client = EtcdClient(options.etcd.split(","))
    stack.push_async_callback(client.close)
    discovery = EtcdDiscovery(client, ttl_s=options.etcd_lease_s)
    stack.push_async_callback(discovery.close)
    return discovery


class Node:
    """The store with its puts and its figures."""

    def __init__(
        self,
        dram: DramTier,
        disks: DiskSet | None,
        transport: KvTransport,
        *,
        term: Callable[[], int | None] = one_term,
        scrub_bytes_per_s: int = 0,
        admission: DiskAdmission | None = None,
        pool: PoolTier | None = None,
    ) -> None:
        self._transport = transport
        self._counters = Counters()
        self.store = BlockStore(dram, disks, self._counters, now_ms=_now_ms, admission=admission, pool=pool)
        self.puts = Puts(self.store, transport, self._counters, now_ms=_now_ms, term=term)
        self._scrubbers = [
            Scrubber(tier, bytes_per_s=scrub_bytes_per_s)
            for tier in (disks.tiers if disks is not None else ())
        ]
        self._expiry: asyncio.Task[None] | None = None

    def start(self, worker: WorkerService) -> None:
        """Start the background work."""
        self.store.start()
        for scrubber in self._scrubbers:
            scrubber.start()
        self._expiry = asyncio.create_task(self._expire_forever(worker))

    def ledger(self) -> worker_pb2.Ledger:
        """What is held for somebody now."""
        return worker_pb2.Ledger(
            blocks_held=self.store.pinned_blocks + self.puts.reserved_blocks,
            pins=self.store.pins,
            reservations=self.puts.reservations,
            transfers=self._transport.reads_in_flight,
            blocks_orphaned=self.store.orphaned_blocks,
        )

    def load(self) -> worker_pb2.LoadReport:
        """Room in memory, in blocks of the size last used."""
        table = self.store.dram.table
        return worker_pb2.LoadReport(
            requests_running=self.store.pins + self.puts.reservations,
            blocks_free=table.n_free,
            blocks_cached=table.n_evictable,
            blocks_held=self.store.pinned_blocks + self.puts.reserved_blocks,
        )

    def totals(self) -> dict[str, float]:
        """Counters and gauges by metric name."""
        gauges = {
            **tier_figures(self.store),
            "slipstream_kv_quarantined_bytes": self._transport.quarantined_bytes,
        }
        for name, value in gauges.items():
            self._counters.set(name, value)
        return self._counters.snapshot()

    async def wait_idle(self, *, timeout_s: float) -> None:
        """Until nothing is held, or the time is over."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        while held(self.ledger()) and loop.time() < give_up_at:
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Write what waits for the disk and end the background work."""
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)
        for scrubber in self._scrubbers:
            await scrubber.close()
        await self.store.close(flush_timeout_s=FLUSH_S)
        if self.store.disk is not None:
            await asyncio.to_thread(self.store.disk.close)

    async def _expire_forever(self, worker: WorkerService) -> None:
        while True:
            await asyncio.sleep(EXPIRY_TICK_S)
            if self.store.expire() + self.puts.expire() + self.store.look_for_orphans():
                worker.load_changed()


def _now_ms() -> float:
    return time.monotonic() * 1000

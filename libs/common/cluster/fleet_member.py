"""How a process joins a fleet and leaves it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Protocol

from libs.common.cluster.discovery import LEASE_TTL_S, Discovery, EtcdDiscovery, InMemoryDiscovery
from libs.common.cluster.worker_record import Worker
from libs.common.cluster.worker_service import WorkerProcess
from libs.common.etcd.access import EtcdAccess
from libs.common.rpc.serve import ServiceHost
from libs.common.runtime.readiness import DRAINING, READY, UNANNOUNCED, ProcessHealth
from libs.common.telemetry.process_metrics import ProcessMetrics
from slipstream.errors import DeadlineExceeded
from slipstream.v1 import worker_pb2

log = logging.getLogger(__name__)

_ANNOUNCE_S = 5.0
# One wait for an announcement, which may take as long as it likes.
_LATE_ANNOUNCE_S = 60.0


async def open_discovery(
    etcd: EtcdAccess, stack: contextlib.AsyncExitStack, *, ttl_s: int = LEASE_TTL_S
) -> Discovery:
    """Open discovery through etcd, or within this process if `etcd` has no endpoints.

    The stack closes it.
    """
    if not etcd.endpoints:
        return InMemoryDiscovery()
    client = etcd.open()
    stack.push_async_callback(client.close)
    discovery = EtcdDiscovery(client, ttl_s=ttl_s)
    stack.push_async_callback(discovery.close)
    return discovery


class LoadedPart(Protocol):
    """The part of a process that does its work."""

    def load(self) -> worker_pb2.LoadReport:
        """The load now."""
        ...

    def ledger(self) -> worker_pb2.Ledger:
        """What it holds for requests."""
        ...


class FleetMember:
    """One process with its server and its record."""

    def __init__(
        self, host: ServiceHost, discovery: Discovery, record: Worker, health: ProcessHealth
    ) -> None:
        """`health`: what the health pages show; it follows the membership."""
        self._host = host
        self._discovery = discovery
        self._record = record
        self._health = health
        health.has_lost_lease = lambda: discovery.has_lost_lease
        self._joining: asyncio.Task[None] | None = None  # `leave` ends it

    async def join(self) -> None:
        """Announce the process, then set it ready. Where etcd is unavailable that comes after the return.

        A process that no router knows gets no work: a rollout must not replace others by it.
        """
        self._discovery.announce(self._record)
        joining = self._joining = asyncio.create_task(self._join(), name="join-fleet")
        await asyncio.wait([joining], timeout=_ANNOUNCE_S)
        if not joining.done():
            log.warning("etcd is unavailable; %s will be announced when it is back", self._record.instance)
            self._health.state = UNANNOUNCED
        elif not joining.cancelled():
            joining.result()

    async def _join(self) -> None:
        while True:
            with contextlib.suppress(DeadlineExceeded):
                await self._discovery.wait_announced(timeout_s=_LATE_ANNOUNCE_S)
                break
        await self._host.set_ready(True)
        self._health.state = READY
        log.info("%s is ready at %s", self._record.instance, self._host.endpoint)

    async def leave(self) -> None:
        """Set the process not ready and withdraw it, so that others stop using it at once."""
        if self._joining is not None:
            self._joining.cancel()
        self._health.state = DRAINING
        await self._host.set_ready(False)
        await self._discovery.withdraw(self._record)


class MemberProcess(WorkerProcess):
    """A process of a fleet around one part. A drained one is no member of the fleet."""

    def __init__(
        self, part: LoadedPart, metrics: ProcessMetrics, member: FleetMember, host: ServiceHost
    ) -> None:
        self._part, self._metrics, self._member, self._host = part, metrics, member, host

    def load(self) -> worker_pb2.LoadReport:
        return self._part.load()

    def ledger(self) -> worker_pb2.Ledger:
        return self._part.ledger()

    def status_counters(self) -> Mapping[str, float]:
        return self._metrics.snapshot()

    async def drain(self) -> None:
        await self._member.leave()

    async def undrain(self) -> None:
        await self._member.join()

    def exit(self) -> None:
        self._host.request_stop()

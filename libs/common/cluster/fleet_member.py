"""How a process joins a fleet and leaves it."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from libs.common.cluster.discovery import LEASE_TTL_S, Discovery, EtcdDiscovery, InMemoryDiscovery
from libs.common.cluster.worker_record import Worker
from libs.common.etcd.access import EtcdAccess
from libs.common.rpc.serve import ServiceHost
from libs.common.runtime.readiness import DRAINING, READY, UNANNOUNCED, ProcessHealth
from slipstream.errors import DeadlineExceeded

log = logging.getLogger(__name__)

_ANNOUNCE_S = 5.0
# How often an announcement that waits for etcd is looked at again; it may take as long as it likes.
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
        health.has_lapsed = lambda: discovery.has_lapsed
        self._joining: asyncio.Task[None] | None = None  # where etcd was unavailable

    async def join(self) -> None:
        """Announce the process, then set it ready. Where etcd is unavailable that comes after the return.

        A process that no router knows gets no work: a rollout must not replace others by it.
        """
        self._discovery.announce(self._record)
        if await self._is_announced(_ANNOUNCE_S):
            await self._set_ready()
            return
        log.warning("etcd is unavailable; %s will be announced when it is back", self._record.instance)
        self._health.state = UNANNOUNCED
        self._joining = asyncio.create_task(self._join_late(), name="join-fleet")

    async def _join_late(self) -> None:
        while not await self._is_announced(_LATE_ANNOUNCE_S):
            pass
        await self._set_ready()

    async def _is_announced(self, within_s: float) -> bool:
        with contextlib.suppress(DeadlineExceeded):
            await self._discovery.wait_announced(timeout_s=within_s)
            return True
        return False

    async def _set_ready(self) -> None:
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

"""A router's place in the cluster: announced or withdrawn, ready or not, and how it leaves its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from libs.common.cluster.discovery import Discovery
from libs.common.cluster.worker_record import Worker
from libs.common.rpc.serve import ServiceHost
from services.router.api.readiness import readiness_of
from services.router.execution.request_manager import RequestManager
from services.router.workers.fleet import RouterFleet
from services.router.workers.router_peers import RouterPeers

HAND_OVER_AFTER_S = 1.0


class RouterMembership:
    """Announces the router in discovery, and reports its readiness by gRPC's health service."""

    def __init__(
        self,
        discovery: Discovery,
        record: Worker,
        manager: RequestManager,
        fleet: RouterFleet,
        peers: RouterPeers,
        hosts: Sequence[ServiceHost],
    ) -> None:
        self._peers = peers
        self._discovery = discovery
        self._record = record
        self._manager = manager
        self._fleet = fleet
        self._hosts = hosts
        self._hand_over: asyncio.TimerHandle | None = None  # of the last drain

    @property
    def is_ready(self) -> bool:
        """Whether the router takes requests now."""
        return readiness_of(self._manager, self._fleet).serves

    def join(self) -> None:
        """Announce the router."""
        self._discovery.announce(self._record)

    async def drain(self) -> None:
        """Refuse new requests. Hand over those that another router can continue, once there is one."""
        self._manager.drain()
        await self._report()
        await self._discovery.withdraw(self._record)
        self._hand_over_later()

    def _hand_over_later(self) -> None:
        """Streams of the SDK continue at another router. Many end before, and without one all may."""
        if self._hand_over is not None:
            self._hand_over.cancel()
        loop = asyncio.get_running_loop()
        self._hand_over = loop.call_later(HAND_OVER_AFTER_S, self._try_hand_over)

    def _try_hand_over(self) -> None:
        if self._peers.has_successor():
            self._manager.hand_over()
        elif self._manager.held:
            self._hand_over_later()

    async def undrain(self) -> None:
        """Take requests again."""
        if self._hand_over is not None:
            self._hand_over.cancel()
        self._manager.undrain()
        self.join()
        await self._report()

    async def follow_readiness(self) -> None:
        """Report each change of the fleet, for ever."""
        while True:
            seen = self._fleet.version
            await self._report()
            await self._fleet.wait_changed(seen)

    async def _report(self) -> None:
        is_ready = self.is_ready
        for host in self._hosts:
            await host.set_ready(is_ready)

"""A router's fleet without a network: connections whose reports are handed to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from libs.common.cluster.discovery import Fleet, InMemoryDiscovery
from libs.common.cluster.worker_record import Role, Worker
from services.router.workers.connection import WorkerConnection
from services.router.workers.fleet import RouterFleet
from slipstream.v1 import common_pb2, worker_pb2

BLOCK_TOKENS = 64
FINGERPRINT = common_pb2.Fingerprint(digest=b"bench", block_tokens=BLOCK_TOKENS)
NOW_S = 1000.0  # no report gets stale while a decision is measured
_CAPACITY = {"max_batch": 64, "block_tokens": BLOCK_TOKENS, "block_bytes": 1 << 22}


class IdleConnection(WorkerConnection):
    """A connection to a worker that answers and does nothing."""

    def report_load(self, report: worker_pb2.LoadReport) -> None:
        """The worker reports this load."""
        self._apply(report)

    async def _follow(self) -> None:
        self.fingerprint, self.digest = FINGERPRINT, FINGERPRINT.digest.hex()
        self.transport = "socket"
        self._apply(worker_pb2.LoadReport())
        await asyncio.Event().wait()


class _IdleFleet(RouterFleet):
    def _open(self, worker: Worker) -> WorkerConnection:
        return IdleConnection(worker, self, clock=self._clock)


@asynccontextmanager
async def open_fleet(
    n_workers: int, *, clock: Callable[[], float] = lambda: NOW_S
) -> AsyncIterator[RouterFleet]:
    """n prefill workers, n decode workers and a kvstore, all ready."""
    discovery = InMemoryDiscovery()
    roles = {Role.PREFILL: n_workers, Role.DECODE: n_workers, Role.KVSTORE: 1}
    for role, count in roles.items():
        for i in range(count):
            discovery.announce(Worker(role, f"{role}-{i}", "127.0.0.1:1", "1", capacity=_CAPACITY))
    async with Fleet(discovery) as members:
        await members.wait_until(lambda fleet: len(fleet.workers) == 2 * n_workers + 1, timeout_s=30)
        fleet = _IdleFleet(members, clock=clock, fits=lambda fingerprint: True)
        await fleet.start()
        try:
            while not all(link.ready for link in fleet.links()):
                await asyncio.sleep(0.01)
            yield fleet
        finally:
            await fleet.close()

"""The load of the other routers, from the WorkerService of their admin ports.

Autoscaling needs it: requests that wait at one router count in the answers of all. Routers do not serve each
other, so a peer that does not answer costs nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import grpc

from libs.common.cluster.discovery import Fleet
from libs.common.cluster.load_report import keep_plausible
from libs.common.cluster.worker_record import Role, Worker
from libs.common.fleet_bounds import MAX_FOLLOWED_ROUTERS
from services.router.workers.connection import LEAST_GAP_S, STALE_AFTER_S
from slipstream.errors import Unavailable
from slipstream.rpc.backoff import ANSWER_S, Backoff
from slipstream.rpc.dial import Dial
from slipstream.rpc.rpc_errors import received
from slipstream.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

_INTERVAL_MS = 250
# Processes that share a port are reached by chance: a dial per try, of about as many tries as processes.
_TRIES = 16


class RouterPeers:
    """Follows every router of discovery but `own`. Use as: start(); ...; await close()."""

    def __init__(self, members: Fleet, *, own: str, dial: Dial, clock: Callable[[], float]) -> None:
        self._members = members
        self._own = own
        self._dial = dial
        self._clock = clock
        self._peers: dict[str, _PeerRouter] = {}  # by instance
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow discovery."""
        self._task = asyncio.create_task(self._follow_discovery(), name="router-peers")

    async def close(self) -> None:
        """End all streams."""
        tasks = [peer.task for peer in self._peers.values()]
        tasks += [self._task] if self._task is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._peers.clear()

    def reports(self) -> Mapping[str, worker_pb2.LoadReport | None]:
        """The last report of each peer, by instance; None when it is stale."""
        since_s = self._clock() - STALE_AFTER_S
        return {
            name: peer.report if peer.reported_s >= since_s else None for name, peer in self._peers.items()
        }

    def has_successor(self) -> bool:
        """Whether a peer reported lately that it is ready: it takes the requests of a router that ends."""
        return any(report is not None and _is_ready(report) for report in self.reports().values())

    def workers(self) -> Mapping[str, Worker]:
        """The record of each peer, by instance."""
        return {name: peer.worker for name, peer in self._peers.items()}

    async def _follow_discovery(self) -> None:
        seen = self._members.current
        while True:
            routers = {worker.instance: worker for worker in seen.with_role(Role.ROUTER) if worker.admin}
            routers.pop(self._own, None)
            for name in list(self._peers):
                if routers.get(name) != self._peers[name].worker:
                    self._peers.pop(name).task.cancel()
            for name, worker in routers.items():
                if name not in self._peers and len(self._peers) < MAX_FOLLOWED_ROUTERS:
                    peer = self._peers[name] = _PeerRouter(worker)
                    peer.task = asyncio.create_task(self._follow(peer), name=f"router-peer-{name}")
            seen = await self._members.wait_changed(seen)

    async def _follow(self, peer: _PeerRouter) -> None:
        backoff = Backoff()
        while True:
            for _ in range(_TRIES):
                try:
                    async with self._dial(peer.worker.admin) as channel:
                        if not await self._answers(peer, channel):
                            continue
                        backoff.succeeded()
                        await self._read(peer, channel)
                except grpc.aio.AioRpcError as error:
                    log.debug("router %s: %s", peer.worker.instance, error.details())
                except Unavailable as error:
                    log.debug("router %s", error)
                break
            await asyncio.sleep(backoff.pause_s())

    async def _answers(self, peer: _PeerRouter, channel: grpc.aio.Channel) -> bool:
        """Whether the process at the other end is the peer."""
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        answer = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=ANSWER_S)
        status = received(answer, sender=peer.worker.instance)
        return (status.instance, status.incarnation) == (peer.worker.instance, peer.worker.incarnation)

    async def _read(self, peer: _PeerRouter, channel: grpc.aio.Channel) -> None:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        async for response in stub.WatchLoad(worker_pb2.WatchLoadRequest(min_interval_ms=_INTERVAL_MS)):
            report = received(response, sender=peer.worker.instance).load
            soon_s = peer.reported_s + LEAST_GAP_S - self._clock()
            peer.report, peer.reported_s = keep_plausible(report), self._clock()
            if soon_s > 0:
                await asyncio.sleep(soon_s)


class _PeerRouter:
    """One router. Its task is set right after it is made."""

    task: asyncio.Task[None]

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.report: worker_pb2.LoadReport | None = None
        self.reported_s = 0.0


def _is_ready(report: worker_pb2.LoadReport) -> bool:
    """Whether a router takes requests. An older version says only whether it drains."""
    return report.ready if report.HasField("ready") else not report.draining

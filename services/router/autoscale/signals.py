"""The load and the holdings of all processes, as every router knows them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from libs.common.cluster.placement_record import Placement, SessionId
from libs.common.cluster.worker_record import Role, Worker
from services.router.autoscale.removal import WorkerHoldings
from services.router.autoscale.types import WorkerLoad
from services.router.workers.connection import WorkerConnection
from services.router.workers.fleet import RouterFleet
from services.router.workers.router_peers import RouterPeers
from slipstream.v1 import worker_pb2

_WORKERS = (Role.PREFILL, Role.DECODE, Role.KVSTORE, Role.DRAFTER)


class FleetSignals:
    """Reads the fleet when it is asked."""

    def __init__(
        self,
        fleet: RouterFleet,
        peers: RouterPeers,
        *,
        own: Worker,
        load: Callable[[], worker_pb2.LoadReport],
        sessions: Callable[[], Mapping[SessionId, Placement]],
    ) -> None:
        """`own`, `load`: the record and the report of this router."""
        self._fleet = fleet
        self._peers = peers
        self._own = own
        self._load = load
        self._sessions = sessions

    def loads(self) -> list[WorkerLoad]:
        """All processes, also those whose load is unknown."""
        loads = [
            WorkerLoad(Role.ROUTER, router.instance, report, endpoint=router.endpoint)
            for router, report in self._routers()
        ]
        for link in self._fleet.links():
            places = link.worker.capacity.get("max_batch", 0)
            loads.append(WorkerLoad(link.worker.role, link.worker.instance, link.report, places))
        return loads

    async def holdings(self) -> list[WorkerHoldings]:
        """The holdings of each process that the fleet uses, without processes that drain."""
        # Tenants may have 100,000s of sessions: to count them takes longer than streams may wait.
        counts, blocks = await asyncio.to_thread(self._placed)
        found = []
        for role in _WORKERS:
            for link in self._fleet.links_of(role):
                if link.draining:
                    continue
                at = (role, link.worker.instance)
                found.append(self._holdings_of(link, sessions=counts[at], session_blocks=blocks[at]))
                await asyncio.sleep(0)  # to count unique blocks takes some milliseconds
        for router, report in self._routers():
            if report is None or not report.draining:
                requests = report.requests_running + report.requests_waiting if report is not None else 0
                found.append(WorkerHoldings(Role.ROUTER, router.instance, router.admin, requests))
        return found

    def _routers(self) -> list[tuple[Worker, worker_pb2.LoadReport | None]]:
        """This router and its peers with their reports, by name."""
        routers = {self._own.instance: self._own, **self._peers.workers()}
        reports = {self._own.instance: self._load(), **self._peers.reports()}
        return [(routers[name], report) for name, report in sorted(reports.items())]

    def _placed(self) -> tuple[Counter[tuple[Role, str]], Counter[tuple[Role, str]]]:
        """(sessions, their blocks) of each worker, by the placements of all routers."""
        counts: Counter[tuple[Role, str]] = Counter()
        blocks: Counter[tuple[Role, str]] = Counter()
        for placement in self._sessions().values():
            at = {
                Role.PREFILL: placement.prefill,
                Role.DECODE: placement.decode,
                Role.KVSTORE: placement.kvstore,
            }
            for role, instance in at.items():
                if instance:
                    counts[role, instance] += 1
                    blocks[role, instance] += placement.block_count
        return counts, blocks

    def _holdings_of(self, link: WorkerConnection, *, sessions: int, session_blocks: int) -> WorkerHoldings:
        report = link.report or worker_pb2.LoadReport()
        worker = link.worker
        return WorkerHoldings(
            worker.role,
            worker.instance,
            worker.endpoint,
            requests=report.requests_running + report.requests_waiting + report.handoffs,
            tokens_in_flight=report.prefill_tokens_in_flight + report.decode_tokens_in_flight,
            unique_blocks=self._fleet.index.unique_blocks(link.key),
            block_tokens=worker.capacity.get("block_tokens", 64),
            sessions=sessions,
            session_blocks=session_blocks,
        )

"""FleetService: the fleet as this router sees it, and calls of operators that it passes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from libs.common.cluster.discovery import Fleet
from libs.common.cluster.worker_record import Worker
from libs.common.fleet_bounds import MAX_ASKED_LEAVING
from libs.common.rpc.access import current_caller
from services.router.operators.fleet_report import find_process, fleet_processes, shown_members
from services.router.operators.process_calls import ProcessCalls
from services.router.workers.fleet import RouterFleet
from services.router.workers.router_peers import RouterPeers
from slipstream.enum_names import ROLES
from slipstream.errors import InvalidArgument, NotFound
from slipstream.v1 import fleet_pb2, fleet_pb2_grpc, worker_pb2

SERVICE_NAME = "slipstream.v1.FleetService"


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """The servicer."""

    def __init__(
        self,
        members: Fleet,
        fleet: RouterFleet,
        peers: RouterPeers,
        calls: ProcessCalls,
        *,
        own: Worker,
        model: str,
        load: Callable[[], worker_pb2.LoadReport],
    ) -> None:
        """`own`, `load`: the record and the report of this router. `model`: the name that clients use."""
        self._members = members
        self._fleet = fleet
        self._peers = peers
        self._calls = calls
        self._own = own
        self._model = model
        self._load = load

    async def GetFleet(
        self, request: fleet_pb2.GetFleetRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.GetFleetResponse:
        members = shown_members(self._members.current, self._own)
        own = {self._own.instance: self._load()}
        asked = [worker for worker in members.leaving if worker.key != self._own.key][:MAX_ASKED_LEAVING]
        reports = await asyncio.gather(*(self._calls.report(worker) for worker in asked))
        leaving = {worker.key: report for worker, report in zip(asked, reports, strict=True)}
        leaving[self._own.key] = own[self._own.instance]
        return fleet_pb2.GetFleetResponse(
            router=self._own.instance,
            model=self._model,
            processes=fleet_processes(
                members,
                self._fleet.links(),
                routers={**self._peers.reports(), **own},
                leaving=lambda worker: leaving.get(worker.key),
            ),
        )

    async def CallProcess(
        self, request: fleet_pb2.CallProcessRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[fleet_pb2.CallProcessResponse]:
        if not request.instance:
            raise InvalidArgument("instance", "is empty")
        role = ROLES.name(request.role)
        members = shown_members(self._members.current, self._own)
        worker = find_process(members, role, request.instance)
        if worker is None:
            raise NotFound(f"no {role} process {request.instance!r} is in the fleet", field="instance")
        responses = self._calls.call(
            worker,
            request.method,
            request.message,
            operator=current_caller().name,
            timeout_s=context.time_remaining(),
        )
        async with aclosing(responses):
            async for message in responses:
                yield fleet_pb2.CallProcessResponse(message=message)

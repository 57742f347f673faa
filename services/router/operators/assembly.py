"""Serves the fleet to operators on a router's admin port."""

from __future__ import annotations

from collections.abc import Callable

from libs.common.cluster.discovery import Fleet
from libs.common.cluster.worker_record import Worker
from libs.common.rpc.serve import ServiceHost
from services.router.operators.fleet_service import SERVICE_NAME, FleetService
from services.router.operators.process_calls import ProcessCalls
from services.router.workers.fleet import RouterFleet
from services.router.workers.router_peers import RouterPeers
from slipstream.v1 import fleet_pb2_grpc, worker_pb2


def add_fleet_service(
    admin: ServiceHost,
    members: Fleet,
    fleet: RouterFleet,
    peers: RouterPeers,
    calls: ProcessCalls,
    *,
    own: Worker,
    model: str,
    load: Callable[[], worker_pb2.LoadReport],
) -> str:
    """The name of the service. `own` is the record of this router, whose load is `load`."""
    servicer = FleetService(members, fleet, peers, calls, own=own, model=model, load=load)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, admin.server)
    return SERVICE_NAME

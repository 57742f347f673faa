"""The processes of the fleet as one router sees them. Pure, but for the clock behind a link."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from libs.common.cluster.kvstore_room import kvstore_rooms
from libs.common.cluster.worker_record import FleetSnapshot, Role, Worker
from libs.common.fleet_bounds import MAX_SHOWN_PROCESSES
from services.router.workers.connection import WorkerConnection
from slipstream.enum_names import ROLES
from slipstream.v1 import fleet_pb2, worker_pb2

READY = fleet_pb2.PROCESS_STATE_READY
SILENT = fleet_pb2.PROCESS_STATE_SILENT
DRAINING = fleet_pb2.PROCESS_STATE_DRAINING
_KVSTORE = ROLES.value(Role.KVSTORE)

Reports = Mapping[str, worker_pb2.LoadReport | None]


def fleet_processes(
    members: FleetSnapshot,
    links: Iterable[WorkerConnection],
    *,
    routers: Reports,
    leaving: Callable[[Worker], worker_pb2.LoadReport | None],
) -> list[fleet_pb2.FleetProcess]:
    """All processes, by role and instance.

    `routers`: the load report of each router by instance. `leaving`: the report of a process that drains,
    which has no link any more. A kvstore node without a block shows the room of its memory.
    """
    found = [_linked(link) for link in links]
    for worker in members.with_role(Role.ROUTER):
        report = routers.get(worker.instance)
        found.append(_process(worker, _state(report, is_ready=report is not None), report))
    found += [_process(worker, DRAINING, leaving(worker)) for worker in members.leaving]
    rooms = kvstore_rooms((*members.workers, *members.leaving))
    for process in found:
        load = process.load
        is_empty = not (load.blocks_free or load.blocks_cached or load.blocks_held)
        if process.role == _KVSTORE and process.HasField("load") and is_empty:
            load.blocks_free = rooms.get(process.instance, 0)
    return sorted(found, key=lambda process: (process.role, process.instance))


def shown_members(members: FleetSnapshot, own: Worker) -> FleetSnapshot:
    """The members as this router shows them: its own record as it made it, and a bounded number of others.

    A writer into etcd can replace a record, and add thousands of false ones.
    """

    def bounded(workers: Iterable[Worker]) -> list[Worker]:
        found = list(workers)
        mine = [own for worker in found if worker.key == own.key]
        return mine + [worker for worker in found if worker.key != own.key][: MAX_SHOWN_PROCESSES - len(mine)]

    others = [worker for worker in members.workers if worker.role is not Role.ROUTER]
    routers = bounded(members.with_role(Role.ROUTER))
    return FleetSnapshot.of((*others, *routers), members.suspects, bounded(members.leaving))


def find_process(members: FleetSnapshot, role: str, instance: str) -> Worker | None:
    """The process of that name, also one that is drained and runs on."""
    for worker in (*members.workers, *members.leaving):
        if (worker.role, worker.instance) == (role, instance):
            return worker
    return None


def _linked(link: WorkerConnection) -> fleet_pb2.FleetProcess:
    return _process(link.worker, _state(link.report, is_ready=link.ready), link.report)


def _state(report: worker_pb2.LoadReport | None, *, is_ready: bool) -> fleet_pb2.ProcessState.ValueType:
    if report is not None and report.draining:
        return DRAINING
    return READY if is_ready else SILENT


def _process(
    worker: Worker, state: fleet_pb2.ProcessState.ValueType, report: worker_pb2.LoadReport | None
) -> fleet_pb2.FleetProcess:
    return fleet_pb2.FleetProcess(
        role=ROLES.value(worker.role),
        instance=worker.instance,
        incarnation=worker.incarnation,
        endpoint=worker.admin or worker.endpoint,
        region=worker.region,
        state=state,
        load=report,
        capacity=worker.capacity,
        admin_http=worker.admin_http,
        client_endpoint=worker.endpoint if worker.role is Role.ROUTER else "",
    )

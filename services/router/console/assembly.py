"""Builds the console of a router from the router's parts."""

from __future__ import annotations

from aiohttp.typedefs import Handler

from libs.common.cluster.discovery import Fleet
from services.router.console.cache_view import CacheView
from services.router.console.console import Console
from services.router.console.fleet_view import FleetView, RouterIdentity
from services.router.console.job_view import JobView
from services.router.console.worker_drains import WorkerDrains
from services.router.console.worker_statuses import WorkerStatuses
from services.router.execution.request_manager import RequestManager
from services.router.jobs.overview import JobOverview
from services.router.operators.process_calls import ProcessCalls
from services.router.workers.router_peers import RouterPeers
from slipstream.rpc.dial import Dial


def make_console(
    identity: RouterIdentity,
    manager: RequestManager,
    members: Fleet,
    peers: RouterPeers,
    *,
    dial: Dial,
    calls: ProcessCalls,
    chat: Handler,
    jobs: JobOverview | None,
) -> Console:
    """`dial` opens channels as a peer, `calls` act for an operator; `chat` answers a chat completion.

    `jobs` is None on a router without a database.
    """
    context = manager.context
    statuses = WorkerStatuses(members, dial=dial, clock=context.clock)
    return Console(
        context,
        FleetView(identity, manager, members, peers, statuses, clock=context.clock),
        CacheView(context.fleet, context.sessions, context.recorder, statuses),
        statuses,
        WorkerDrains(members, calls),
        JobView(jobs),
        chat=chat,
    )

"""The execution of a router's requests, whichever port they come by: the fleet, placement and the manager."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from libs.common.cluster.discovery import Discovery, Fleet
from libs.common.cluster.exit_reports import ExitReports
from libs.common.cluster.placements import Placements
from libs.common.cluster.worker_record import Role
from libs.common.telemetry.counters import Counters
from services.router.execution.context import RouterContext
from services.router.execution.dispatcher import Dispatcher
from services.router.execution.failover import FailoverState
from services.router.execution.request_manager import RequestManager
from services.router.execution.sessions import Sessions
from services.router.metering.assembly import make_metering
from services.router.options import RouterOptions
from services.router.recording.recorder import RequestRecorder
from services.router.request.conversations.token_cache import TokenCache
from services.router.request.model_card import ModelCard
from services.router.workers.awake_clock import AwakeClock
from services.router.workers.context_limit import ContextLimit
from services.router.workers.fleet import RouterFleet
from services.router.workers.router_peers import RouterPeers
from slipstream.errors import DeadlineExceeded
from slipstream.rpc.dial import Dial


class RequestPipeline:
    """The connections to workers and other routers, and the requests that run over them.

    Needs a running event loop. Ports are not its part: `RouterServer` has them.
    """

    def __init__(
        self,
        card: ModelCard,
        discovery: Discovery,
        placements: Placements,
        options: RouterOptions,
        *,
        exit_reports: ExitReports | None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.counters = Counters()
        self.members = Fleet(discovery)
        self.dial = Dial(options.tls, options.peer_tokens())
        self._awake = AwakeClock(clock)
        self._tasks: list[asyncio.Task[None]] = []
        self.peers = RouterPeers(self.members, own=options.instance, dial=self.dial, clock=clock)
        self.fleet = RouterFleet(
            self.members,
            dial=self.dial,
            clock=self._awake.now_s,
            fits=card.fits,
            region_ms=options.region_ms,
            silence_s=options.silence_s,
        )
        self.card = replace(card, workers_context_tokens=ContextLimit(self.fleet))
        self.sessions = Sessions(placements)
        self.token_cache = TokenCache()
        self.recorder = RequestRecorder(clock=clock, wall_clock_s=time.time)
        context = RouterContext(
            fleet=self.fleet,
            dispatcher=Dispatcher(self.fleet, clock=clock),
            sessions=self.sessions,
            card=self.card,
            counters=self.counters,
            clock=clock,
            wall_clock_s=time.time,
            failover=FailoverState(clock=clock, exit_reports=exit_reports),
            recorder=self.recorder,
            recovery_wait_s=options.recovery_wait_s,
            token_cache=self.token_cache,
            salts=options.salts,
            metering=make_metering(
                options.keys,
                card.names,
                self.counters,
                self.members,
                instance=options.instance,
                prices=options.prices,
                database=options.database,
            ),
        )
        self.manager = RequestManager(
            context,
            max_requests=options.max_requests,
            allow_requested_prefill=options.allow_requested_prefill,
        )

    async def start(self) -> None:
        """Follow discovery and connect to what it names."""
        self._tasks.append(asyncio.create_task(self._awake.run(), name="awake-clock"))
        await self.members.__aenter__()
        await self.fleet.start()
        self.peers.start()

    async def has_workers(self, *, look_s: float, connect_s: float) -> bool:
        """Wait until requests can run: `look_s` for names of workers, then `connect_s` for answers."""
        needed = (Role.PREFILL, Role.DECODE)
        try:
            await self.members.wait_until(
                lambda known: all(known.with_role(role) for role in needed), timeout_s=look_s
            )
            async with asyncio.timeout(connect_s):
                while not self.fleet.ready:
                    await self.fleet.wait_changed(self.fleet.version)
        except (TimeoutError, DeadlineExceeded):
            return False
        return True

    async def close(self) -> None:
        """End the connections. The requests have ended (`RequestManager.close`)."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peers.close()
        await self.fleet.close()
        await self.members.__aexit__(None, None, None)

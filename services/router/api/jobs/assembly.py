"""Everything about jobs in one router: the store, what runs them, their webhooks, JobService."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from libs.common.service_bounds import MAX_RUNNING_JOBS
from libs.database.database import Database
from services.router.admission.types import Priority
from services.router.api.api_keys import ApiKeys
from services.router.api.formats import FORMATS
from services.router.api.jobs.executor import AnswerExecutor
from services.router.api.jobs.service import SERVICE_NAME, JobService, job_handlers
from services.router.api.readiness import readiness_of
from services.router.api.rpc.server import GrpcServer
from services.router.execution.request_manager import RequestManager
from services.router.jobs.decisions import Headroom, jobs_allowed
from services.router.jobs.leases import JobLeases
from services.router.jobs.overview import JobOverview
from services.router.jobs.pacing import JobPacing
from services.router.jobs.puller import JobPuller
from services.router.jobs.store import JobStore
from services.router.jobs.webhooks.policy import WebhookHosts
from services.router.jobs.webhooks.sender import WebhookSender
from services.router.workers.fleet import RouterFleet
from slipstream.v1 import worker_pb2


class JobSettings(Protocol):
    """The settings that an operator states."""

    @property
    def instance(self) -> str:
        """The name of the router."""

    @property
    def database(self) -> Database | None:
        """Where jobs are stored; None: they are refused."""

    @property
    def jobs_beside_live(self) -> int:
        """The most jobs that this router runs beside live requests."""

    @property
    def jobs_longest_wait_s(self) -> float:
        """After so long a job waits for live requests no more."""

    @property
    def keys(self) -> ApiKeys:
        """The API keys by which jobs run."""

    @property
    def webhook_hosts(self) -> WebhookHosts:
        """Where webhooks may go."""


class RouterJobs:
    """`store` is None without a database. `formats`: what a job may run; other APIs add theirs."""

    def __init__(self, options: JobSettings, manager: RequestManager, fleet: RouterFleet) -> None:
        clock, counters = asyncio.get_running_loop().time, manager.context.counters
        self._manager, self._fleet, self._options = manager, fleet, options
        self.formats = dict(FORMATS)
        self.store: JobStore | None = None
        self.overview: JobOverview | None = None
        self._executor = AnswerExecutor(
            manager, self.formats, clock=clock, wall_clock_s=time.time, key_counts=options.keys.counts
        )
        self._pacing = JobPacing(options.jobs_beside_live)
        self._puller: JobPuller | None = None
        self._webhooks: WebhookSender | None = None
        if (database := options.database) is not None:
            self.store = JobStore(database, wall_clock_s=time.time, counters=counters)
            self.overview = JobOverview(database, wall_clock_s=time.time, counters=counters)
            self._puller = JobPuller(
                JobLeases(database, wall_clock_s=time.time),
                self._executor,
                instance=options.instance,
                room=self._room,
                clock=clock,
                wall_clock_s=time.time,
                counters=counters,
                longest_wait_s=options.jobs_longest_wait_s,
            )
            manager.jobs.observer = self._pacing
            self._webhooks = WebhookSender(
                database, options.webhook_hosts, wall_clock_s=time.time, counters=counters
            )

    def serve(self, api: GrpcServer) -> None:
        """Register JobService beside the router's own service."""
        service = JobService(
            self.store,
            self._executor,
            api.callers,
            self._options.webhook_hosts,
            read=self._manager.read,
            run_piece=self._manager.context.threads.run,
        )
        api.add(SERVICE_NAME, job_handlers(service, api))

    def start(self) -> None:
        """Begin to run jobs."""
        if self._puller is not None and self._webhooks is not None:
            self._puller.start()
            self._webhooks.start()

    async def close(self) -> None:
        """Give all jobs back."""
        if self._puller is not None and self._webhooks is not None:
            await self._webhooks.close()
            await self._puller.close()

    def gauges(self) -> dict[str, float]:
        """The metrics of the queue; none without a database."""
        if self._puller is None:
            return {}
        return {
            **self._puller.gauges(),
            "slipstream_jobs_held": self._manager.jobs.held,
            "slipstream_jobs_overdue": self._puller.overdue,
            "slipstream_job_holds_total": self._manager.jobs.n_held_total,
            "slipstream_jobs_beside_live": self._pacing.beside,
            "slipstream_jobs_quiet_seconds": self._pacing.quiet_s,
        }

    def add_to(self, report: worker_pb2.LoadReport) -> worker_pb2.LoadReport:
        """Complete the load report: what the queue holds, and what of it this router could run."""
        if self._puller is not None:
            report.jobs_waiting = self._puller.waiting
            report.jobs_running = self._puller.running
            report.jobs_allowed = jobs_allowed(self._room(), max_running=MAX_RUNNING_JOBS)
        return report

    def _room(self) -> Headroom:
        gate = self._manager.gate
        capacity = gate.capacity()
        beside, overdue = self._pacing.beside, self._puller.overdue if self._puller is not None else 0
        self._manager.jobs.beside = max(beside, overdue)
        live_running, live_waiting = gate.controller.above(Priority.JOB)
        return Headroom(
            is_ready=readiness_of(self._manager, self._fleet).serves,
            live_running=live_running,
            live_waiting=live_waiting,
            places=capacity.decode_sequences,
            idle_prefills=max(0, capacity.prefill_workers - gate.controller.prefilling),
            live_ended_s=(gate.now_ms() - gate.controller.live_ended_ms) / 1e3,
            beside_live=beside,
            quiet_s=self._pacing.quiet_s,
            is_draining=self._manager.draining,
            overdue=overdue,
        )

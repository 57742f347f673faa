"""The APIs of a router that need its jobs: Workers AI's runs, files and batches."""

from __future__ import annotations

import asyncio
import time

from libs.database.database import Database
from services.router.api.batches.assembly import make_batches
from services.router.api.formats import FORMATS
from services.router.api.http_server import HttpServer
from services.router.api.jobs.assembly import RouterJobs
from services.router.api.workers_ai.endpoint import RunEndpoints
from services.router.execution.request_manager import RequestManager


def add_families(
    http: HttpServer, runs: RequestManager, database: Database | None, jobs: RouterJobs
) -> list[asyncio.Task[None]]:
    """Add their routes, before the server listens. The tasks work until they are cancelled."""
    batches, runner = make_batches(
        runs, http.reader, database, jobs.store, paths=jobs.formats, wall_clock_s=time.time
    )
    http.add(batches)
    http.add(
        RunEndpoints(runs, http.reader, http.generation, jobs.store, formats=FORMATS, models=http.models)
    )
    return [] if runner is None else [asyncio.create_task(runner.run(), name="batches")]

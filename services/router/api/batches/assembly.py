"""Files and batches as a part of a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from libs.database.database import Database
from services.router.api.batches.batch_store import BatchStore
from services.router.api.batches.endpoint import BatchEndpoints
from services.router.api.batches.file_store import FileStore
from services.router.api.batches.runner import BatchRunner
from services.router.api.http.answer_delivery import AnswerDelivery
from services.router.api.http.request_reader import RequestReader
from services.router.execution.request_manager import RequestManager
from services.router.jobs.store import JobStore


def make_batches(
    manager: RequestManager,
    reader: RequestReader,
    database: Database | None,
    jobs: JobStore | None,
    *,
    delivery: AnswerDelivery,
    paths: Collection[str],
    wall_clock_s: Callable[[], float],
) -> tuple[BatchEndpoints, BatchRunner | None]:
    """The endpoints, and what works behind them. `paths`: the endpoints that a job may call.

    Without a database the endpoints say so, and nothing works.
    """
    if database is None or jobs is None:
        nothing = BatchEndpoints(
            manager, reader, None, delivery=delivery, endpoints=paths, on_changed=lambda: None
        )
        return nothing, None
    files = FileStore(database, wall_clock_s=wall_clock_s)
    batches = BatchStore(database, wall_clock_s=wall_clock_s)
    runner = BatchRunner(
        batches, files, jobs, run_piece=manager.context.threads.run, clock=asyncio.get_running_loop().time
    )
    served = BatchEndpoints(
        manager, reader, (files, batches), delivery=delivery, endpoints=paths, on_changed=runner.wake
    )
    return served, runner

"""Files and batches as a part of a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from libs.database.database import Database
from services.router.api.batches.batch_store import BatchStore
from services.router.api.batches.file_store import FileStore
from services.router.api.batches.operations import BatchOperations
from services.router.api.batches.runner import BatchRunner
from services.router.execution.request_manager import RequestManager
from services.router.jobs.store import JobStore


def make_batches(
    manager: RequestManager,
    database: Database | None,
    jobs: JobStore | None,
    *,
    paths: Collection[str],
    wall_clock_s: Callable[[], float],
) -> tuple[BatchOperations, BatchRunner | None]:
    """What both APIs do, and what works behind it. `paths`: the endpoints that a job may call.

    Without a database the operations say so, and nothing works.
    """
    if database is None or jobs is None:
        return BatchOperations(None, endpoints=paths, on_changed=lambda: None), None
    files = FileStore(database, wall_clock_s=wall_clock_s)
    batches = BatchStore(database, wall_clock_s=wall_clock_s)
    runner = BatchRunner(
        batches, files, jobs, run_piece=manager.context.threads.run, clock=asyncio.get_running_loop().time
    )
    return BatchOperations((files, batches), endpoints=paths, on_changed=runner.wake), runner

"""Ends of jobs that the database refuses: the job fails with the reason, or is found by the next router."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from libs.common.service_bounds import MAX_REFUSED_ENDS
from libs.database.errors import DatabaseUnavailable
from services.router.jobs.types import JobState
from slipstream.errors import Internal
from tests.router.jobs.puller_rig import PullerRig


def refuse_results(rig: PullerRig, error: Exception) -> list[str]:
    """Make the database refuse each result with `error` from now on; the jobs for which it did, in order."""
    refused: list[str] = []
    run = rig.tables.database.run

    async def refusing(work: Any, **options: Any) -> Any:
        if work.__name__ != "finish":
            return await run(work, **options)
        refused.append(work.__name__)
        raise error

    rig.tables.database.run = refusing  # type: ignore[method-assign]
    return refused


@pytest.mark.parametrize("error", [Internal("the database refuses a statement"), ValueError("a defect")])
async def test_a_job_whose_result_is_refused_fails_with_the_reason_and_others_run_on(
    rig: PullerRig, error: Exception
) -> None:
    [job_id] = await rig.tables.submit("a")
    rig.start("r1")
    await rig.until_begun(1)
    refused = refuse_results(rig, error)
    rig.executor.finish_all()
    await rig.until_states(failed=1, running=0)
    assert len(refused) == (MAX_REFUSED_ENDS if isinstance(error, Internal) else 1)
    job = await rig.tables.store.get("alice", job_id)
    assert str(error) in job.error and type(error).__name__ in job.error and job.status == 500
    assert rig.counters.snapshot()['slipstream_jobs_ended_total{state="failed"}'] == 1
    await rig.tables.submit("b")
    await rig.until_begun(2)


async def test_a_result_waits_for_a_database_that_is_unavailable(rig: PullerRig) -> None:
    await rig.tables.submit("a")
    rig.start("r1")
    await rig.until_begun(1)
    run = rig.tables.database.run
    refused = refuse_results(rig, DatabaseUnavailable("away"))
    rig.executor.finish_all()
    async with asyncio.timeout(30):
        while len(refused) <= MAX_REFUSED_ENDS:
            await asyncio.sleep(0.01)
    assert (await rig.tables.store.counts("alice")).running == 1
    rig.tables.database.run = run  # type: ignore[method-assign]
    await rig.until_states(succeeded=1)


async def test_a_job_whose_end_no_statement_stores_is_found_by_the_next_router(rig: PullerRig) -> None:
    [job_id] = await rig.tables.submit("a")
    first = rig.start("r1")
    await rig.until_begun(1)
    run = rig.tables.database.run

    async def refusing(work: Any, **options: Any) -> Any:
        raise Internal("the database refuses a statement")

    rig.tables.database.run = refusing  # type: ignore[method-assign]
    rig.executor.finish_all()
    async with asyncio.timeout(30):
        while first.running:
            await asyncio.sleep(0.01)
    await first.close()
    rig.tables.database.run = run  # type: ignore[method-assign]
    assert (await rig.tables.store.get("alice", job_id)).state is JobState.RUNNING
    rig.start("r2")
    rig.executor.ends.clear()
    await rig.tables.database.run(lambda tx: tx.execute("DELETE FROM job_owners WHERE owner LIKE 'r1.%'"))
    await rig.tables.leases.sweep()
    async with asyncio.timeout(30):
        while job_id not in rig.executor.ends:
            await asyncio.sleep(0.01)
    rig.executor.finish_all()
    await rig.until_states(succeeded=1)

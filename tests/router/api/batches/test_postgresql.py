"""A batch on PostgreSQL, whose statements are checked by the server alone."""

from __future__ import annotations

from libs.database.database import open_database
from services.router.api.batches.states import BatchState
from tests.database.conftest import postgres  # noqa: F401 - fixture
from tests.router.api.batches.conftest import BatchTables, line
from tests.router.jobs.stores import JobTables
from tests.support.processes.postgres import PostgresServer


async def test_a_batch_runs_and_another_is_cancelled(postgres: PostgresServer) -> None:  # noqa: F811
    database = open_database(postgres.url)
    tables = BatchTables(JobTables(database))
    await tables.jobs.leases.register("router")
    batch = await tables.create(line("a") + line("b"))
    assert await tables.step()
    await tables.end_job()
    await tables.end_job()
    assert await tables.step()
    batch = await tables.get(batch)
    assert (batch.state, batch.counts.completed) == (BatchState.COMPLETED, 2)
    assert len(await tables.read(batch.output_file)) == 2
    other = await tables.create(line("c"))
    assert await tables.step()
    await tables.batches.cancel(other.tenant, other.id)
    assert await tables.step()
    assert (await tables.get(other)).state is BatchState.CANCELLED
    await database.close()

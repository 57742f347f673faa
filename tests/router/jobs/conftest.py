"""The tables of jobs on both databases, empty for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.database.database import Database, open_database
from tests.database.conftest import database_url, postgres  # noqa: F401 - fixtures
from tests.router.jobs.puller_rig import PullerRig
from tests.router.jobs.stores import JobTables

TABLES = ("jobs", "job_requests", "job_results", "job_tenants", "job_owners", "job_notices")


async def empty(database: Database) -> None:
    for table in TABLES:
        await database.run(lambda tx, table=table: tx.execute(f"DELETE FROM {table}"))  # type: ignore[misc]


@pytest.fixture
async def tables(database_url: str) -> AsyncIterator[JobTables]:  # noqa: F811
    database = open_database(database_url)
    made = JobTables(database)
    await empty(database)
    yield made
    await database.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[PullerRig]:
    """Pullers on SQLite."""
    database = open_database(f"sqlite:{tmp_path}/jobs.db")
    made = PullerRig(JobTables(database))
    yield made
    for puller in made.pullers:
        await puller.close()
    await database.close()

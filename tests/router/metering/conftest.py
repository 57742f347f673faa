"""The tables of metering on both databases, empty for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from libs.database.database import Database, open_database
from libs.database.transaction import SqlTransaction
from services.router.metering import lease_store, usage_store
from tests.database.conftest import database_url, postgres  # noqa: F401 - fixtures

TABLES = ("usage_counters", "usage_batches", "limit_leases", "limit_lock")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:  # noqa: F811
    opened = open_database(database_url)
    for schema in (usage_store.SCHEMA, lease_store.SCHEMA):
        opened.declare(schema)
    await opened.run(_empty)
    yield opened
    await opened.close()


def _empty(tx: SqlTransaction) -> None:
    for table in TABLES:
        tx.execute(f"DELETE FROM {table}")

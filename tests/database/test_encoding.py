"""A PostgreSQL database whose encoding is not UTF-8, as an image without a locale makes it."""

from __future__ import annotations

import psycopg
import pytest

from libs.database.database import open_database
from libs.database.schema import Schema
from tests.support.processes.postgres import PostgresServer

_TEXTS = Schema("texts", (("CREATE TABLE IF NOT EXISTS texts (id TEXT PRIMARY KEY)",),))


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_texts_are_texts(postgres: PostgresServer, encoding: str) -> None:
    name = encoding.lower()
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute(
            f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        )
    database = open_database(postgres.url.replace("/postgres?", f"/{name}?"))
    database.declare(_TEXTS)
    await database.run(lambda tx: tx.execute("INSERT INTO texts VALUES (?)", ("Grüße",)))
    assert await database.read(lambda tx: tx.execute("SELECT id FROM texts")) == [("Grüße",)]
    await database.close()

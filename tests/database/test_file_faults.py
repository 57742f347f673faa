"""A file that is deleted, replaced or read-only: nothing is written past it, and the error names it."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.database.database import Database, open_database
from libs.database.errors import DatabaseFault, DatabaseUnavailable
from libs.database.schema import Schema
from libs.database.sqlite import SqliteDriver

NOTES = Schema("notes", (("CREATE TABLE IF NOT EXISTS notes (id TEXT PRIMARY KEY)",),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "test.db"


@pytest.fixture
async def notes(path: Path) -> AsyncIterator[Database]:
    database = open_database(f"sqlite:{path}")
    database.declare(NOTES)
    await _insert(database, "first")
    yield database
    await database.close()


async def _insert(database: Database, note: str, *, timeout_s: float = 60.0) -> None:
    await database.run(lambda tx: tx.execute("INSERT INTO notes VALUES (?)", (note,)), timeout_s=timeout_s)


async def _notes(database: Database, *, timeout_s: float = 60.0) -> list[str]:
    rows = await database.read(lambda tx: tx.execute("SELECT id FROM notes ORDER BY id"), timeout_s=timeout_s)
    return [row[0] for row in rows]


@pytest.mark.parametrize("replaced", [False, True])
async def test_nothing_is_written_past_a_file_that_is_gone(
    notes: Database, path: Path, replaced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files = [path.with_name(path.name + end) for end in ("", "-wal", "-shm")]
    away = [each.rename(each.with_name("away-" + each.name)) for each in files if each.exists()]
    if replaced:
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE notes (id TEXT PRIMARY KEY)")
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable, match="deleted or replaced"):
                await _insert(notes, "lost", timeout_s=2.0)
            with pytest.raises(DatabaseUnavailable, match="deleted or replaced"):
                await _notes(notes, timeout_s=2.0)
    said = [record for record in caplog.records if "nothing is stored" in record.message]
    assert len(said) == 1
    assert os.path.exists(path) == replaced  # noqa: ASYNC240 - no empty file takes its place
    for each in files:
        each.unlink(missing_ok=True)
    for each in away:
        each.rename(path.with_name(each.name.removeprefix("away-")))
    await _insert(notes, "second")
    assert await _notes(notes) == ["first", "second"]


def test_a_read_only_file_is_no_defect(path: Path) -> None:
    driver = SqliteDriver(path)
    connection = driver.connect(is_read_only=False)
    connection.execute("CREATE TABLE notes (id TEXT)")
    raw = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    with pytest.raises(sqlite3.OperationalError) as refused:
        raw.execute("INSERT INTO notes VALUES ('x')")
    assert driver.fault_of(refused.value) is DatabaseFault.READ_ONLY
    raw.close()
    connection.close()


async def test_writes_to_a_file_that_became_read_only_fail_by_name_and_reads_go_on(path: Path) -> None:
    database = open_database(f"sqlite:{path}")
    database.declare(NOTES)
    await _insert(database, "first")

    def become_read_only(tx: object) -> None:
        tx.execute("PRAGMA query_only = 1")  # type: ignore[attr-defined]

    await database.run(become_read_only)
    with pytest.raises(DatabaseUnavailable, match="read-only"):
        await _insert(database, "second", timeout_s=2.0)
    assert await _notes(database) == ["first"]
    await database.close()

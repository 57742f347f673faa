"""Transactions on both databases: commit, undo, repetition, bounds."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from libs.database.database import Database, check_database_url, open_database
from libs.database.errors import DatabaseDamaged, DatabaseFault, DatabaseFull, DatabaseUnavailable
from libs.database.schema import Schema
from libs.database.sqlite import SqliteDriver
from libs.database.transaction import SqlConnection, SqlTransaction
from slipstream.errors import FailedPrecondition, Internal, InvalidArgument, Overloaded
from tests.support.processes.postgres import PostgresServer

_CREATE = "CREATE TABLE IF NOT EXISTS notes (id TEXT PRIMARY KEY, body BLOB NOT NULL, count BIGINT NOT NULL)"
NOTES = Schema("notes", ((_CREATE,),))


def _insert(note_id: str) -> Any:
    return lambda tx: tx.execute("INSERT INTO notes VALUES (?, ?, 0)", (note_id, b"100 %"))


def _ids(tx: SqlTransaction) -> list[str]:
    return [row[0] for row in tx.execute("SELECT id FROM notes ORDER BY id")]


def _modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.fixture
async def notes(database: Database) -> Database:
    database.declare(NOTES)
    await database.run(lambda tx: tx.execute("DELETE FROM notes"))
    return database


async def test_a_transaction_that_returned_is_seen_by_others(notes: Database, database_url: str) -> None:
    await notes.run(_insert("a"))
    other = open_database(database_url)
    other.declare(NOTES)
    assert await other.read(_ids) == ["a"]
    assert await other.read(lambda tx: tx.execute("SELECT body, count FROM notes")) == [(b"100 %", 0)]
    await other.close()


async def test_an_exception_undoes_its_own_transaction_only(notes: Database) -> None:
    def fail(tx: SqlTransaction) -> None:
        _insert("undone")(tx)
        raise FailedPrecondition("changed its mind")

    outcomes = await asyncio.gather(
        *[notes.run(work) for work in (_insert("a"), fail, _insert("b"))], return_exceptions=True
    )
    assert isinstance(outcomes[1], FailedPrecondition)
    assert await notes.read(_ids) == ["a", "b"]


async def test_a_refused_statement_fails_alone(notes: Database) -> None:
    await notes.run(_insert("a"))
    outcomes = await asyncio.gather(
        *[notes.run(_insert(note_id)) for note_id in ("b", "a", "c")], return_exceptions=True
    )
    assert isinstance(outcomes[1], Internal)
    assert await notes.read(_ids) == ["a", "b", "c"]


async def test_counts_of_many_callers_add_up(notes: Database, database_url: str) -> None:
    await notes.run(_insert("a"))
    other = open_database(database_url)
    other.declare(NOTES)

    def count(tx: SqlTransaction) -> None:
        [(seen,)] = tx.execute(f"SELECT count FROM notes WHERE id = 'a' {tx.for_update}")
        tx.execute("UPDATE notes SET count = ? WHERE id = 'a'", (seen + 1,))

    await asyncio.gather(*[database.run(count) for database in (notes, other) for _ in range(100)])
    assert await notes.read(lambda tx: tx.execute("SELECT count FROM notes")) == [(200,)]
    await other.close()


async def test_a_read_changes_nothing(notes: Database) -> None:
    with pytest.raises(Internal):
        await notes.read(_insert("a"))
    assert await notes.read(_ids) == []


async def test_a_schema_grows_by_its_new_steps(database: Database, database_url: str) -> None:
    grown = Schema(
        "grown", ((_CREATE.replace("notes", "grown"),), ("ALTER TABLE grown ADD COLUMN more TEXT",))
    )
    database.declare(Schema("grown", grown.steps[:1]))
    await database.run(lambda tx: tx.execute("DELETE FROM grown"))
    for _ in range(2):
        newer = open_database(database_url)
        newer.declare(grown)
        assert await newer.read(lambda tx: tx.execute("SELECT more FROM grown")) == []
        await newer.close()
    older = open_database(database_url)
    older.declare(Schema("grown", grown.steps[:1]))
    with pytest.raises(FailedPrecondition, match="newer release"):
        await older.read(lambda tx: tx.execute("SELECT id FROM grown"))
    async with asyncio.timeout(30):  # together they share a transaction
        works = [older.run(lambda tx: tx.execute("SELECT id FROM grown")) for _ in range(8)]
        refused = await asyncio.gather(*works, return_exceptions=True)
    assert {type(each) for each in refused} == {FailedPrecondition}
    await older.close()


async def test_a_text_with_nul_is_no_defect(notes: Database) -> None:
    with contextlib.suppress(InvalidArgument):  # PostgreSQL takes none
        assert await notes.read(lambda tx: tx.execute("SELECT id FROM notes WHERE id = ?", ("a\0b",))) == []


async def test_a_full_queue_refuses(tmp_path: Path) -> None:
    database = Database(SqliteDriver(tmp_path / "test.db"), max_waiting=2)
    begun, gate = threading.Event(), threading.Event()

    def hold(tx: SqlTransaction) -> None:
        begun.set()
        assert gate.wait(30)

    held = asyncio.create_task(database.run(hold))
    assert await asyncio.to_thread(begun.wait, 30)
    waiting = [asyncio.create_task(database.run(lambda tx: None)) for _ in range(2)]
    await asyncio.sleep(0)
    assert database.waiting == 2
    with pytest.raises(Overloaded):
        await database.run(lambda tx: None)
    gate.set()
    await asyncio.gather(held, *waiting)
    await database.close()


async def test_a_cancelled_transaction_that_waits_does_not_run(tmp_path: Path) -> None:
    database = open_database(f"sqlite:{tmp_path}/test.db")
    database.declare(NOTES)
    begun, gate = threading.Event(), threading.Event()

    def hold(tx: SqlTransaction) -> None:
        begun.set()
        assert gate.wait(30)

    held = asyncio.create_task(database.run(hold))
    assert await asyncio.to_thread(begun.wait, 30)
    waiting = asyncio.create_task(database.run(_insert("a")))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    gate.set()
    await held
    assert await database.read(_ids) == []
    await database.close()


async def test_a_cancelled_transaction_is_not_tried_again() -> None:
    tries: list[bool] = []
    tried_twice = threading.Event()

    class AwayDriver:
        writers, group_size = 1, 1
        errors: type[Exception] = ConnectionError

        def connect(self, *, is_read_only: bool) -> SqlConnection:
            tries.append(is_read_only)
            if len(tries) == 2:
                tried_twice.set()
            raise ConnectionError

        def fault_of(self, error: Exception) -> DatabaseFault:
            return DatabaseFault.LOST

    database = Database(AwayDriver())
    running = asyncio.create_task(database.run(lambda tx: None, timeout_s=10, is_idempotent=True))
    assert await asyncio.to_thread(tried_twice.wait, 30)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    n_tries = len(tries)
    await database.close()
    assert len(tries) <= n_tries + 1


async def test_a_locked_file_is_waited_for_and_then_refused(tmp_path: Path) -> None:
    database = open_database(f"sqlite:{tmp_path}/test.db")
    database.declare(NOTES)
    await database.run(_insert("a"))
    other = sqlite3.connect(tmp_path / "test.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseUnavailable, match="locked"):
        await database.run(_insert("b"), timeout_s=0.1)
    assert await database.read(_ids) == ["a"]
    waits = asyncio.create_task(database.run(_insert("b")))
    other.execute("COMMIT")
    await waits
    other.close()
    await database.close()


async def test_a_full_disk_is_named_and_heals(tmp_path: Path) -> None:
    database = open_database(f"sqlite:{tmp_path}/test.db")
    database.declare(NOTES)

    def bound(tx: SqlTransaction) -> None:
        [(pages,)] = tx.execute("PRAGMA page_count")
        tx.execute(f"PRAGMA max_page_count = {pages + 2}")

    await database.run(bound)
    statement = "INSERT INTO notes VALUES (?, ?, 0)"
    large = [database.run(lambda tx: tx.execute(statement, ("large", bytes(20_000)))) for _ in range(4)]
    outcomes = await asyncio.gather(database.run(_insert("a")), *large, return_exceptions=True)
    assert outcomes[0] == [] and all(isinstance(each, DatabaseFull) for each in outcomes[1:])
    await database.run(lambda tx: tx.execute("PRAGMA max_page_count = 100000"))
    await database.run(_insert("b"))
    assert await database.read(_ids) == ["a", "b"]
    await database.close()


async def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "test.db").write_bytes(b"no database" * 1000)
    database = open_database(f"sqlite:{tmp_path}/test.db")
    with pytest.raises(DatabaseDamaged):
        await database.run(lambda tx: tx.execute("SELECT 1"))
    await database.close()


async def test_a_new_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    database = open_database(f"sqlite:{tmp_path}/test.db")
    database.declare(NOTES)
    await database.run(_insert("a"))
    assert _modes(tmp_path) == {0o600}
    await database.close()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
async def test_a_restart_of_postgresql_is_survived(postgres: PostgresServer, how: int) -> None:
    database = open_database(postgres.url)
    database.declare(NOTES)
    await database.run(lambda tx: tx.execute("DELETE FROM notes"))
    await database.run(_insert("a"))
    await asyncio.to_thread(postgres.stop, how)
    with pytest.raises(DatabaseUnavailable):
        await database.run(_insert("refused"), timeout_s=0.2)
    waits = asyncio.create_task(database.run(_insert("b"), timeout_s=60))
    await asyncio.to_thread(postgres.start)
    await waits
    assert await database.read(_ids) == ["a", "b"]
    await database.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mysql://u:secret@h/x", "postgresql"),
        ("sqlite:", "path of a file"),
    ],
)
def test_a_wrong_url_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refusal:
        check_database_url(url)
    assert "secret" not in str(refusal.value)


def test_a_file_in_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="is no directory"):
        open_database(f"sqlite:{tmp_path}/none/x.db")

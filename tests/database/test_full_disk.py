"""A disk that is nearly full: new content is refused, deletions go on, and what they free is room again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.batch_bounds import SPARE_DISK_BYTES
from libs.database.database import Database
from libs.database.errors import DatabaseFull
from libs.database.schema import Schema
from libs.database.sqlite import SqliteConnection, SqliteDriver
from libs.database.transaction import SqlTransaction

MIB = 1 << 20
DISK_BYTES = 8 * MIB  # of which one is spare
NOTES = Schema("notes", (("CREATE TABLE IF NOT EXISTS notes (id TEXT PRIMARY KEY, body BLOB NOT NULL)",),))


class Disk:
    """A disk with as much free room as a test says."""

    def __init__(self) -> None:
        self.free_bytes = DISK_BYTES

    def room(self, path: Path) -> tuple[int, int]:
        assert path.name == "test.db"
        return self.free_bytes, DISK_BYTES


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
async def database(tmp_path: Path, disk: Disk) -> AsyncIterator[Database]:
    opened = Database(SqliteDriver(tmp_path / "test.db", disk_room=disk.room))
    opened.declare(NOTES)
    yield opened
    await opened.close()


async def _add(database: Database, note_id: str, *, n_bytes: int = 10, adds_content: bool = True) -> None:
    def insert(tx: SqlTransaction) -> None:
        tx.execute("INSERT INTO notes VALUES (?, ?)", (note_id, bytes(n_bytes)))

    await database.run(insert, adds_content=adds_content)


async def _delete(database: Database, note_id: str) -> None:
    await database.run(lambda tx: tx.execute("DELETE FROM notes WHERE id = ?", (note_id,)))


async def test_the_last_room_is_left_to_deletions(database: Database, disk: Disk) -> None:
    await _add(database, "long", n_bytes=2 * MIB)
    await _add(database, "short")
    disk.free_bytes = MIB
    await _add(database, "last")
    disk.free_bytes = MIB - 1
    with pytest.raises(DatabaseFull):
        await _add(database, "more")
    await _add(database, "end of a job", adds_content=False)
    await _delete(database, "short")
    with pytest.raises(DatabaseFull):  # it has freed too little
        await _add(database, "more")
    await _delete(database, "long")
    await _add(database, "more")
    rows = await database.read(lambda tx: tx.execute("SELECT id FROM notes ORDER BY id"))
    assert rows == [("end of a job",), ("last",), ("more",)]


async def test_one_commit_takes_deletions_and_refuses_content(database: Database, disk: Disk) -> None:
    await _add(database, "a")
    disk.free_bytes = 0
    outcomes = await asyncio.gather(
        *[_add(database, f"n{index}") for index in range(8)],
        _delete(database, "a"),
        _add(database, "b", adds_content=False),
        return_exceptions=True,
    )
    assert [type(each) for each in outcomes] == [DatabaseFull] * 8 + [type(None)] * 2
    assert await database.read(lambda tx: tx.execute("SELECT id FROM notes")) == [("b",)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("database") / "test.db"


@given(free=st.integers(0, 2 * SPARE_DISK_BYTES), disk_bytes=st.integers(0, 64 * SPARE_DISK_BYTES))
def test_an_eighth_of_a_small_disk_is_spare(path: Path, free: int, disk_bytes: int) -> None:
    connection = SqliteConnection(path, is_read_only=False, disk_room=lambda _: (free, disk_bytes))
    try:
        assert connection.is_nearly_full() == (free < min(SPARE_DISK_BYTES, disk_bytes // 8))
    finally:
        connection.close()

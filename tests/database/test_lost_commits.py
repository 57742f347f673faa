"""A connection that breaks while it commits; the transaction may have happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libs.database.database import Database
from libs.database.errors import DatabaseFault, DatabaseUnavailable
from libs.database.schema import Schema
from libs.database.sqlite import SqliteConnection, SqliteDriver

COUNTS = Schema("counts", (("CREATE TABLE IF NOT EXISTS counts (n BIGINT)",),))


class LosingConnection(SqliteConnection):
    """Commits, and then loses the answer while `driver.losses` lasts."""

    driver: LosingDriver

    def commit(self) -> None:
        super().commit()
        if self.driver.losses:
            self.driver.losses -= 1
            raise LostAnswer


class LostAnswer(Exception):
    """The answer to a commit did not arrive."""


class LosingDriver(SqliteDriver):
    """SQLite as if behind a network."""

    errors: type[Exception] = LostAnswer
    losses = 0

    def connect(self, *, is_read_only: bool) -> SqliteConnection:
        connection = LosingConnection(self._path, is_read_only=is_read_only)
        connection.driver = self
        return connection

    def fault_of(self, error: Exception) -> DatabaseFault:
        return DatabaseFault.LOST


def _count(tx: Any) -> None:
    tx.execute("INSERT INTO counts VALUES (1)")


@pytest.mark.parametrize("is_idempotent", [False, True])
async def test_only_what_may_run_twice_runs_twice(is_idempotent: bool, tmp_path: Path) -> None:
    with_answers = Database(SqliteDriver(tmp_path / "test.db"))
    with_answers.declare(COUNTS)
    await with_answers.run(lambda tx: None)
    driver = LosingDriver(tmp_path / "test.db")
    database = Database(driver)
    database.declare(COUNTS)
    driver.losses = 1
    if is_idempotent:
        await database.run(_count, is_idempotent=True)
    else:
        with pytest.raises(DatabaseUnavailable) as error:
            await database.run(_count)
        assert error.value.may_have_committed
    rows = await with_answers.read(lambda tx: tx.execute("SELECT COUNT(*) FROM counts"))
    assert rows == [(1 + is_idempotent,)]
    await database.close()
    await with_answers.close()

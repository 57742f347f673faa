"""The database of a process: transactions as functions, run in threads.

database = open_database("sqlite:/var/lib/slipstream/slipstream.db")
database.declare(Schema("notes", ((
    "CREATE TABLE IF NOT EXISTS notes (id TEXT PRIMARY KEY, body BLOB NOT NULL, made_unix_s BIGINT)",
),)))

def insert(tx: SqlTransaction) -> None:
    tx.execute("INSERT INTO notes VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING", (note_id, body, now_s))

await database.run(insert, is_idempotent=True)      # returned = committed and synced
rows = await database.read(lambda tx: tx.execute("SELECT id FROM notes"))
await database.close()
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from libs.database.schema import Schema
from libs.database.sqlite import SqliteDriver
from libs.database.thread import DatabaseThread
from libs.database.transaction import SqlDriver, SqlTransaction
from libs.database.work_queue import DatabaseWork, WorkQueue
from slipstream.errors import FailedPrecondition

T = TypeVar("T")

MAX_WAITING_TRANSACTIONS = 4096
TRANSACTION_TIMEOUT_S = 10.0
_SQLITE, _POSTGRES = "sqlite:", ("postgresql://", "postgres://")


class Database:
    """Runs transactions of one event loop or several. Its threads begin with the first transaction."""

    def __init__(self, driver: SqlDriver, *, max_waiting: int = MAX_WAITING_TRANSACTIONS) -> None:
        self._driver = driver
        self._schemas: list[Schema] = []
        self._writes, self._reads = WorkQueue(max_waiting), WorkQueue(max_waiting)
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    @property
    def waiting(self) -> int:
        """Transactions that no thread has taken yet."""
        return len(self._writes) + len(self._reads)

    def declare(self, schema: Schema) -> None:
        """Create the tables, if they are missing, before the next transaction. May be called again."""
        if all(schema.name != known.name for known in self._schemas):
            self._schemas.append(schema)

    async def run(
        self,
        work: Callable[[SqlTransaction], T],
        *,
        timeout_s: float = TRANSACTION_TIMEOUT_S,
        is_idempotent: bool = False,
        tenant: str = "",
        adds_content: bool = False,
    ) -> T:
        """Run `work` in one transaction and return its value after the commit; what it raises undoes it.

        `work` runs in a thread, and again where the database was locked or lost: it changes nothing but the
        database. With `is_idempotent` it also runs again where a commit may have happened. Tenants take
        turns, so what one of them causes names it. What `adds_content` leaves the last room of a disk to
        deletions. Raises DatabaseUnavailable, DatabaseFull, DatabaseDamaged,
        Overloaded, and Internal for a refused statement.
        """
        until_s = time.monotonic() + timeout_s
        item = DatabaseWork(work, until_s, is_idempotent, tenant, adds_content)
        result: T = await self._submit(self._writes, item)
        return result

    async def read(
        self,
        work: Callable[[SqlTransaction], T],
        *,
        timeout_s: float = TRANSACTION_TIMEOUT_S,
        tenant: str = "",
    ) -> T:
        """Run `work` in a transaction that changes nothing, and that never waits for a writer."""
        item = DatabaseWork(work, time.monotonic() + timeout_s, is_idempotent=True, tenant=tenant)
        result: T = await self._submit(self._reads, item)
        return result

    async def close(self) -> None:
        """Run what waits, then end the threads."""
        self._is_closed = True
        self._writes.close()
        self._reads.close()
        await asyncio.gather(*[asyncio.to_thread(thread.join) for thread in self._threads])

    async def _submit(self, queue: WorkQueue, work: DatabaseWork) -> Any:
        if not self._threads and not self._is_closed:
            self._start()
        queue.put(work)
        try:
            return await asyncio.wrap_future(work.future)
        except asyncio.CancelledError:
            work.deadline_s = 0.0  # without a caller the work does not run again
            raise

    def _start(self) -> None:
        for queue, count in ((self._writes, self._driver.writers), (self._reads, 1)):
            for _ in range(count):
                body = DatabaseThread(self._driver, queue, self._schemas, is_read_only=queue is self._reads)
                self._threads.append(threading.Thread(target=body.run, name="database", daemon=True))
        for thread in self._threads:
            thread.start()


def check_database_url(url: str) -> None:
    """Raises ValueError for a URL that `open_database` does not take. The message has no password."""
    if url.startswith(_SQLITE):
        if not Path(url.removeprefix(_SQLITE)).name:
            raise ValueError("sqlite: without the path of a file")
    elif not url.startswith(_POSTGRES):
        raise ValueError("not sqlite:PATH or postgresql://USER@HOST/NAME")


def has_password(url: str) -> bool:
    """Whether a URL that `check_database_url` takes states a password."""
    parts = urlsplit(url)
    return url.startswith(_POSTGRES) and (parts.password is not None or "password" in parse_qs(parts.query))


def open_database(url: str) -> Database:
    """The database of `sqlite:PATH` or `postgresql://...`, which connects with the first use.

    Raises ValueError for another URL, and FailedPrecondition where the file's directory is missing.
    """
    check_database_url(url)
    if url.startswith(_SQLITE):
        path = Path(url.removeprefix(_SQLITE))
        if not path.parent.is_dir():
            raise FailedPrecondition(f"--database: {str(path.parent)!r} is no directory")
        return Database(SqliteDriver(path))
    from libs.database.postgres import PostgresDriver

    return Database(PostgresDriver(url))

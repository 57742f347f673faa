"""SQLite: one file, which several processes of a host may open."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from libs.database.errors import Fault
from libs.database.transaction import SqlValue

# How long one statement waits for another process's transaction. Work is retried until its deadline.
_BUSY_TIMEOUT_S = 1.0
_MAX_LOG_BYTES = 64 << 20  # of the write-ahead log, once it is copied into the file
_FAULTS = {
    sqlite3.SQLITE_BUSY: Fault.BUSY,
    sqlite3.SQLITE_LOCKED: Fault.BUSY,
    sqlite3.SQLITE_FULL: Fault.FULL,
    sqlite3.SQLITE_IOERR: Fault.LOST,
    sqlite3.SQLITE_CANTOPEN: Fault.LOST,
    sqlite3.SQLITE_READONLY_DBMOVED: Fault.LOST,
    sqlite3.SQLITE_READONLY_RECOVERY: Fault.LOST,
    sqlite3.SQLITE_PROTOCOL: Fault.BUSY,
    sqlite3.SQLITE_CORRUPT: Fault.DAMAGED,
    sqlite3.SQLITE_NOTADB: Fault.DAMAGED,
}


class SqliteDriver:
    """Opens connections to one file. A file that is new is readable by its owner only."""

    # One writer; its commits are shared by what waits, so that one fsync serves many transactions.
    writers = 1
    group_size = 64
    errors: type[Exception] = sqlite3.Error

    def __init__(self, path: Path) -> None:
        self._path = path

    def connect(self, *, is_read_only: bool) -> SqliteConnection:
        """A connection for the calling thread. Raises what `fault_of` names."""
        with contextlib.suppress(OSError):  # SQLite itself reports what is wrong with the path
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        return SqliteConnection(self._path, is_read_only=is_read_only)

    def fault_of(self, error: Exception) -> Fault:
        """What the driver's exception means."""
        code = getattr(error, "sqlite_errorcode", 0)
        return _FAULTS.get(code) or _FAULTS.get(code & 0xFF, Fault.DEFECT)


class SqliteConnection:
    """Implements SqlConnection.

    `synchronous=FULL` syncs the log at each commit, so an accepted job survives a power failure. NORMAL loses
    the last commits there. Commits are shared (`group_size`), so FULL costs one sync for many transactions.
    """

    skip_locked = ""
    for_update = ""

    def __init__(self, path: Path, *, is_read_only: bool) -> None:
        self._begin = "BEGIN" if is_read_only else "BEGIN IMMEDIATE"
        self._raw = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        try:
            self._raw.execute("PRAGMA journal_mode = WAL")
            self._raw.execute("PRAGMA synchronous = FULL")
            self._raw.execute("PRAGMA foreign_keys = ON")
            self._raw.execute("PRAGMA trusted_schema = OFF")
            self._raw.execute(f"PRAGMA journal_size_limit = {_MAX_LOG_BYTES}")
            self._raw.execute(f"PRAGMA query_only = {int(is_read_only)}")
        except BaseException:
            self._raw.close()
            raise

    def begin(self) -> None:
        """Begin. A writer takes the write lock now, so that no statement finds it taken later."""
        self._raw.execute(self._begin)

    def commit(self) -> None:
        """Commit, synced to the disk."""
        self._raw.execute("COMMIT")

    def lock_schema(self) -> None:
        """Nothing: the write lock is held."""

    def rollback(self) -> None:
        """Undo what is open."""
        with contextlib.suppress(sqlite3.Error):
            if self._raw.in_transaction:
                self._raw.execute("ROLLBACK")

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open. SQLite itself ends it at some errors, a full disk for one."""
        return self._raw.in_transaction

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(sqlite3.Error):
            self._raw.close()

    def execute(self, sql: str, values: Sequence[SqlValue] = ()) -> list[tuple[Any, ...]]:
        """Run one statement."""
        return self._raw.execute(sql, values).fetchall()

    def execute_many(self, sql: str, rows: Iterable[Sequence[SqlValue]]) -> None:
        """Run one statement for each row of values."""
        self._raw.executemany(sql, rows)

"""SQLite: one file, which several processes of a host may open."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from libs.common.batch_bounds import SPARE_DISK_BYTES
from libs.database.errors import DatabaseFault
from libs.database.transaction import SqlValue

log = logging.getLogger(__name__)

# How long one statement waits for another process's transaction. Work is retried until its deadline.
_BUSY_TIMEOUT_S = 1.0
_MAX_LOG_BYTES = 64 << 20  # of the write-ahead log, once it is copied into the file
_FAULTS = {
    sqlite3.SQLITE_READONLY: DatabaseFault.READ_ONLY,
    sqlite3.SQLITE_BUSY: DatabaseFault.BUSY,
    sqlite3.SQLITE_LOCKED: DatabaseFault.BUSY,
    sqlite3.SQLITE_FULL: DatabaseFault.FULL,
    sqlite3.SQLITE_IOERR: DatabaseFault.LOST,
    sqlite3.SQLITE_CANTOPEN: DatabaseFault.LOST,
    sqlite3.SQLITE_READONLY_DBMOVED: DatabaseFault.LOST,
    sqlite3.SQLITE_READONLY_RECOVERY: DatabaseFault.LOST,
    sqlite3.SQLITE_PROTOCOL: DatabaseFault.BUSY,
    sqlite3.SQLITE_CORRUPT: DatabaseFault.DAMAGED,
    sqlite3.SQLITE_NOTADB: DatabaseFault.DAMAGED,
}


# The free bytes of a path's disk, and all of them.
DiskRoom: TypeAlias = Callable[[Path], tuple[int, int]]


class FileMoved(sqlite3.OperationalError):
    """The path names another file than the one that this process opened first, or none."""


class SqliteDriver:
    """Opens connections to one file. A file that is new is readable by its owner only.

    What is written to a deleted file is lost, so each transaction checks that the path still names the file.
    """

    # One writer; its commits are shared by what waits, so that one fsync serves many transactions.
    writers = 1
    group_size = 64
    errors: type[Exception] = sqlite3.Error

    def __init__(self, path: Path, *, disk_room: DiskRoom | None = None) -> None:
        self._path = path
        self._disk_room = disk_room or room_of_disk
        self._opened: tuple[int, int] | None = None  # device and inode
        self._is_moved = False

    def connect(self, *, is_read_only: bool) -> SqliteConnection:
        """A connection for the calling thread. Raises what `fault_of` names."""
        if self._opened is None:
            with contextlib.suppress(OSError):  # SQLite itself reports what is wrong with the path
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        else:
            self.check_file()
        connection = SqliteConnection(
            self._path, is_read_only=is_read_only, check_file=self.check_file, disk_room=self._disk_room
        )
        if self._opened is None:
            self._opened = _file_at(self._path)
        return connection

    def check_file(self) -> None:
        """Raises FileMoved where the path does not name the opened file."""
        is_moved = self._opened is not None and _file_at(self._path) != self._opened
        if is_moved and not self._is_moved:
            log.error("%s was deleted or replaced: nothing is stored until it is back", self._path)
        self._is_moved = is_moved
        if is_moved:
            raise FileMoved("the file was deleted or replaced")

    def fault_of(self, error: Exception) -> DatabaseFault:
        """The meaning of the driver's exception."""
        if isinstance(error, FileMoved):
            return DatabaseFault.MOVED
        code = getattr(error, "sqlite_errorcode", 0)
        return _FAULTS.get(code) or _FAULTS.get(code & 0xFF, DatabaseFault.DEFECT)


def room_of_disk(path: Path) -> tuple[int, int]:
    """The free bytes of the path's disk, and all of them."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def _file_at(path: Path) -> tuple[int, int] | None:
    """Device and inode; None where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


class SqliteConnection:
    """Implements SqlConnection.

    `synchronous=FULL` syncs the log at each commit, so an accepted job survives a power failure. NORMAL loses
    the last commits there. Commits are shared (`group_size`), so FULL costs one sync for many transactions.
    """

    skip_locked = ""
    for_update = ""

    def __init__(
        self,
        path: Path,
        *,
        is_read_only: bool,
        check_file: Callable[[], None] = lambda: None,
        disk_room: DiskRoom | None = None,
    ) -> None:
        self._path = path
        self._check_file = check_file
        self._disk_room = disk_room or room_of_disk
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
        self._check_file()
        self._raw.execute(self._begin)

    def commit(self) -> None:
        """Commit, synced to the disk."""
        self._raw.execute("COMMIT")

    def lock_schema(self) -> None:
        """Do nothing: the write lock covers the schema."""

    def rollback(self) -> None:
        """Undo what is open."""
        with contextlib.suppress(sqlite3.Error):
            if self._raw.in_transaction:
                self._raw.execute("ROLLBACK")

    def is_nearly_full(self) -> bool:
        """See SqlConnection. Free pages of the file count as room: it never shrinks."""
        free_bytes, disk_bytes = self._disk_room(self._path)
        spare_bytes = min(SPARE_DISK_BYTES, disk_bytes // 8)
        if free_bytes >= spare_bytes:
            return False
        [(free_pages,)], [(page_bytes,)] = (
            self.execute("PRAGMA freelist_count"),
            self.execute("PRAGMA page_size"),
        )
        return bool(free_bytes + free_pages * page_bytes < spare_bytes)

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

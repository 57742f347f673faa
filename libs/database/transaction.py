"""A work function's view of its transaction, the same on both databases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from libs.database.errors import DatabaseFault

SqlValue = str | int | float | bytes | None


class SqlTransaction(Protocol):
    """One open transaction. Statements use `?` for values; a row is a tuple.

    `skip_locked` and `for_update` end a SELECT whose rows the transaction changes. SQLite has one writer at a
    time and needs neither, so both are empty there.
    """

    skip_locked: str
    for_update: str

    def execute(self, sql: str, values: Sequence[SqlValue] = ()) -> list[tuple[Any, ...]]:
        """Run one statement; the rows of SELECT and RETURNING."""

    def execute_many(self, sql: str, rows: Iterable[Sequence[SqlValue]]) -> None:
        """Run one statement for each row of values."""


class SqlConnection(SqlTransaction, Protocol):
    """One connection of a driver, used by one thread."""

    def begin(self) -> None:
        """Begin a transaction."""

    def commit(self) -> None:
        """Commit it."""

    def lock_schema(self) -> None:
        """Keep others that create tables out until the transaction ends."""

    def rollback(self) -> None:
        """Undo it. Never raises; does nothing where no transaction is open."""

    def is_nearly_full(self) -> bool:
        """Whether what is left of the disk is for transactions that add no content. Amid a transaction."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""

    def close(self) -> None:
        """Close the connection. Never raises."""


class SqlDriver(Protocol):
    """One database, and what differs between databases."""

    writers: int  # threads, each with one connection
    group_size: int  # transactions that one commit may share
    errors: type[Exception]

    def connect(self, *, is_read_only: bool) -> SqlConnection:
        """A connection for the calling thread. Raises `errors`."""

    def fault_of(self, error: Exception) -> DatabaseFault:
        """The meaning of one of `errors`."""

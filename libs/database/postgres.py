"""PostgreSQL, for routers on several hosts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import psycopg

from libs.database.errors import DatabaseFault
from libs.database.transaction import SqlValue

_CONNECT_TIMEOUT_S = 5
_STATEMENT_TIMEOUT_MS = 10_000
_SCHEMA_LOCK = 0x511BD8  # among the server's advisory locks
_SILENCE_MS = 10_000  # of a server that acknowledges nothing
_OPTIONS = f"-c statement_timeout={_STATEMENT_TIMEOUT_MS} -c lock_timeout={_STATEMENT_TIMEOUT_MS}"
_BLOB = re.compile(r"\bBLOB\b")
# By the first characters of SQLSTATE: https://www.postgresql.org/docs/current/errcodes-appendix.html
_FAULTS = {
    "40": DatabaseFault.BUSY,  # serialization failure, deadlock
    "55P03": DatabaseFault.BUSY,  # lock_timeout
    "57014": DatabaseFault.BUSY,  # statement_timeout
    "53": DatabaseFault.BUSY,  # too many connections, out of memory
    "53100": DatabaseFault.FULL,
    "57P": DatabaseFault.LOST,  # the server stops or starts
    "08": DatabaseFault.LOST,
    "XX001": DatabaseFault.DAMAGED,
    "XX002": DatabaseFault.DAMAGED,
}


@lru_cache(maxsize=512)
def postgres_sql(sql: str) -> str:
    """The statement as psycopg takes it: `%s` for `?`, BYTEA for BLOB. No literal may hold `?`."""
    return _BLOB.sub("BYTEA", sql.replace("%", "%%").replace("?", "%s"))


class PostgresDriver:
    """Opens connections to one server."""

    writers = 4
    group_size = 1
    errors: type[Exception] = psycopg.Error

    def __init__(self, url: str) -> None:
        self._url = url

    def connect(self, *, is_read_only: bool) -> PostgresConnection:
        """A connection for the calling thread. Raises what `fault_of` names."""
        return PostgresConnection(self._url, is_read_only=is_read_only)

    def fault_of(self, error: Exception) -> DatabaseFault:
        """The meaning of the driver's exception."""
        state = getattr(error, "sqlstate", None) or ""
        for length in (5, 3, 2):
            if state[:length] in _FAULTS:
                return _FAULTS[state[:length]]
        if isinstance(error, psycopg.DataError) and not state:  # psycopg itself refuses NUL characters
            return DatabaseFault.VALUE
        is_cut = isinstance(error, psycopg.OperationalError) and not state
        return DatabaseFault.LOST if is_cut else DatabaseFault.DEFECT


class PostgresConnection:
    """Implements SqlConnection, at isolation READ COMMITTED."""

    skip_locked = "FOR UPDATE SKIP LOCKED"
    for_update = "FOR UPDATE"

    def __init__(self, url: str, *, is_read_only: bool) -> None:
        self._raw = psycopg.connect(
            url,
            autocommit=True,
            connect_timeout=_CONNECT_TIMEOUT_S,
            tcp_user_timeout=_SILENCE_MS,
            options=_OPTIONS,
            application_name="slipstream",
            client_encoding="UTF8",  # a server in SQL_ASCII would answer with bytes in place of texts
        )
        self._begin = "BEGIN READ ONLY" if is_read_only else "BEGIN"

    def begin(self) -> None:
        """Begin."""
        self._raw.execute(self._begin)

    def commit(self) -> None:
        """Commit."""
        self._raw.execute("COMMIT")

    def lock_schema(self) -> None:
        """Keep others that create tables out until the transaction ends."""
        self._raw.execute("SELECT pg_advisory_xact_lock(%s)", (_SCHEMA_LOCK,))

    def rollback(self) -> None:
        """Undo what is open."""
        with contextlib.suppress(psycopg.Error):
            if self.in_transaction:
                self._raw.execute("ROLLBACK")

    def is_nearly_full(self) -> bool:
        """Return False: the disk is the server's."""
        return False

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open, a failed one included."""
        status = self._raw.info.transaction_status
        return status in (psycopg.pq.TransactionStatus.INTRANS, psycopg.pq.TransactionStatus.INERROR)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(psycopg.Error):
            self._raw.close()

    def execute(self, sql: str, values: Sequence[SqlValue] = ()) -> list[tuple[Any, ...]]:
        """Run one statement."""
        cursor = self._raw.execute(postgres_sql(sql), values)
        return cursor.fetchall() if cursor.description is not None else []

    def execute_many(self, sql: str, rows: Iterable[Sequence[SqlValue]]) -> None:
        """Run one statement for each row of values."""
        with self._raw.cursor() as cursor:
            cursor.executemany(postgres_sql(sql), rows)
